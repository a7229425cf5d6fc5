"""A toy of each kind, at most 40 lines, and a row in each table: if a run with them needs an edit elsewhere, the
extension point is broken, and adding an encoder requires understanding everything."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from modernbert_train.__main__ import main, read_run
from modernbert_train.train import session
from tests.extension import rows
from tests.support.gloo import run_ranks
from tests.support.paths import ROOT
from tests.support.runs import assert_equal_runs, killed_and_gone_on, records
from tests.support.tiny_run import TinyRun

HERE = Path(__file__).parent
MODEL = {"vocab_size": 512, "hidden_size": 32, "num_layers": 2, "num_heads": 1, "intermediate_size": 32}
NUMBERS = {"norm_eps": 1e-5, "init_std": 0.05, "init_cutoff": 2.0}


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows.add(monkeypatch.setitem)


def toys(words: list[str]) -> list[str]:
    """The tiny run, all of toys; a phase overrides the toy's own key."""
    file = Path(words[0])
    run = yaml.safe_load(file.read_text())
    run["model"] = {"name": "bag", **MODEL, **NUMBERS}
    run["objective"], run["optim"] = {"name": "first"}, {"name": "sign", "lr": 1e-3}
    run["phases"]["long"]["model"] = {"mixture": 0.2}
    run["evals"] = {"size": {"name": "norm", "every_tokens": 1000}}
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    return words


def test_a_toy_has_at_most_forty_lines_of_its_own() -> None:
    for file in HERE.glob("toy_*.py"):
        lines = [line for line in file.read_text().splitlines() if line.strip() and "import" not in line]
        assert len(lines) <= 40, file.name


@pytest.mark.parametrize("toy", ["encoder", "objective", "format"])  # of the others `init extension` writes better ones
def test_the_page_shows_the_toy(toy: str) -> None:
    """Untested code on a page is wrong within a month."""
    code = (HERE / f"toy_{toy}.py").read_text()
    start = code.index("@dataclass") if "@dataclass\n" in code or "@dataclass(" in code else code.index("\ndef ") + 1
    assert code[start:].rstrip() in (ROOT / "docs/extending.md").read_text(), "copy the toy to docs/extending.md"


@pytest.mark.runs
def test_toys_are_trained_measured_drawn_killed_and_resumed(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The report knows nothing of norms."""
    common = ("checkpoint.interval_steps=3", "data.num_workers=0")
    assert main(["train", *toys(tiny_run(*common, "name=whole"))]) == 0
    killed_and_gone_on(toys(tiny_run(*common, "name=killed")), step=8)
    assert_equal_runs(tmp_path / "runs/killed", tmp_path / "runs/whole")
    lines = records(tmp_path / "runs/whole", "evaluation")
    assert len(lines) >= 3 and all(line["name"] == "size" and line["figures"]["norm"] > 0 for line in lines)
    assert "size: norm" in (tmp_path / "runs/whole/report.html").read_text()
    assert main(["eval", *toys(tiny_run(*common, "name=whole"))]) == 0


@pytest.mark.runs
def test_toys_are_exported_and_started_from(tiny_run: TinyRun, tmp_path: Path) -> None:
    assert main(["train", *toys(tiny_run("phases.long=null"))]) == 0
    assert main(["export", *toys(tiny_run("phases.long=null")), "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["bag"]["hidden_size"] == 32
    words = toys(tiny_run("phases.long=null", "name=next", f"weights.init_from={tmp_path / 'out'}"))
    assert main(["train", *words]) == 0
    before, after = (records(tmp_path / "runs" / name) for name in ("tiny", "next"))
    assert after[0]["loss"] < before[0]["loss"], "it continues from the other's weights"


def train_toys(words: list[str]) -> None:
    """On one rank."""
    rows.add()
    session.joined = lambda *_: nullcontext()  # type: ignore[assignment]  # the test's own process group
    session.train(read_run(words))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_toys_as_one_does(tiny_run: TinyRun, tmp_path: Path, strategy: str) -> None:
    """Until the signs of two sums differ, which they may where a gradient is as good as zero: the first steps."""
    few = ("phases.long=null", "phases.short.tokens=2000", "data.validation=null")
    assert main(["train", *toys(tiny_run(*few, "name=one"))]) == 0
    run_ranks(train_toys, 2, toys(tiny_run(*few, "name=two", f"distributed.strategy={strategy}")), timeout_seconds=150)
    one, two = (records(tmp_path / "runs" / name) for name in ("one", "two"))
    assert [(step["tokens"], step["predicted"]) for step in one] == [(s["tokens"], s["predicted"]) for s in two]
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=1e-3)


@pytest.mark.runs
def test_toys_are_planned_and_their_bad_values_refused(tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Its parameters are the model's: two layers and a dense matrix with biases, the table and its bias."""
    assert main(["plan", *toys(tiny_run())]) == 0
    assert f"model     {512 * 32 + 3 * (32 * 32 + 32) + 512:,} parameters" in capsys.readouterr().out
    assert main(["check", *toys(tiny_run("model.mixture=1.5"))]) == 78  # a key needs only its bounds
    assert "model.mixture=1.5: must be at least 0 and at most 1." in capsys.readouterr().err
