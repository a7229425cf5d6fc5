"""The tool that asks whether tests notice mistakes. If it is wrong, an answer of "all noticed" is worth nothing."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import planted_faults
from benchmarks.faults import FAULTS, Fault
from benchmarks.planted_faults import Outcome, planted, table, try_faults
from tests.support.paths import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_can_still_be_planted(fault: Fault) -> None:
    """In one place, as code that can be read: any test notices a syntax error, and that would tell nothing."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file} has changed: say {fault.name} in its new words (faults.py)"
    assert fault.new != fault.old and fault.loses
    if fault.file.endswith(".py"):
        ast.parse(text.replace(fault.old, fault.new))
    assert fault.tests and all((ROOT / test).is_file() for test in fault.tests)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 33


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project of one function, of which a test looks at one value; and a test that is broken."""
    root = tmp_path / "project"
    (root / "thing").mkdir(parents=True)
    (root / "thing/__init__.py").write_text("def area(a, b):\n    return a * b\n")
    (root / "test_area.py").write_text("from thing import area\n\ndef test_area():\n    assert area(2, 2) == 4\n")
    (root / "test_broken.py").write_text("def test_broken():\n    assert False\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.mark.slow
def test_a_fault_is_noticed_or_survives_and_the_answers_are_kept(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = [
        Fault("halved", "thing/__init__.py", "a * b", "a * b / 2", "half of it", ("test_area.py",)),
        Fault("added", "thing/__init__.py", "a * b", "a + b", "2 + 2 is 4 too", ("test_area.py",)),
        Fault("unknown", "thing/__init__.py", "a * b", "a - b", "the tests fail anyway", ("test_broken.py",)),
    ]
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    out = tmp_path / "outcomes.jsonl"
    found = try_faults(faults, tree, out, 60)
    assert [outcome.text() for outcome in found] == [
        "test_area.py::test_area",
        "SURVIVED",
        "test_broken.py::test_broken fails without any fault",
    ]
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
    assert "1 of 3 noticed" in table(faults, found)

    monkeypatch.setattr(planted_faults, "run_tests", lambda *_: pytest.fail("it is known already"))
    assert try_faults(faults[:2], tree, out, 60) == found[:2]
    monkeypatch.setattr(planted_faults, "run_tests", lambda *_: (None, None))
    assert try_faults([faults[0]._replace(new="b * a")], tree, out, 60)[0].noticed_by is None  # another fault
    (tree / "test_area.py").write_text("def test_nothing():\n    pass\n")
    assert try_faults(faults[:1], tree, out, 60)[0].noticed_by is None  # other tests

    monkeypatch.setattr(planted_faults, "FAULTS", faults)
    monkeypatch.setattr(planted_faults, "try_faults", lambda *_: [Outcome("halved", "a test", None, 1.0)])
    monkeypatch.setattr("sys.argv", ["planted_faults", "--only", "halved"])
    assert planted_faults.main() == 0
    monkeypatch.setattr(planted_faults, "try_faults", lambda *_: [Outcome("halved", None, None, 1.0)])
    assert planted_faults.main() == 1 and "| SURVIVED |" in capsys.readouterr().out


@pytest.mark.runs
def test_a_fault_that_fits_nowhere_or_in_two_places_is_refused(tree: Path) -> None:
    """Or the table would go stale with the code, and everything in it be noticed for ever."""
    file = tree / "thing/__init__.py"
    sound = file.read_text() + "# not a + b but a * b\n"
    file.write_text(sound)
    for old, count in (("a / b", 0), ("a * b", 2)):
        fault = Fault("x", "thing/__init__.py", old, "c", "it", ("test_area.py",))
        with (
            pytest.raises(ValueError, match=re.escape(f"x: thing/__init__.py has '{old}' {count} times, not once")),
            planted(fault, tree),
        ):
            pytest.fail("planted all the same")
        assert file.read_text() == sound


@pytest.mark.runs
def test_tests_that_do_not_end_notice_nothing(tree: Path) -> None:
    (tree / "test_area.py").write_text("import time\n\ndef test_area():\n    time.sleep(60)\n")
    assert planted_faults.run_tests(["test_area.py"], tree, 1.0) == (None, "stopped after 1 s")
