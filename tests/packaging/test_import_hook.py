"""Composer in a file of the user's own: a callback, a test or a notebook that imports it before anything of ours."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from modernbert_train import import_stubs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages with the file that install.sh writes into the environment's."""
    folder = tmp_path / "packages"
    folder.mkdir()
    assert import_stubs.write_hook(folder).parent == folder
    return folder


def run(packages: Path, code: str, *, project: bool = True) -> subprocess.CompletedProcess[str]:
    """A program of an environment with these packages."""
    start = f"import site, sys; sys.path.insert(0, {str(packages)!r}); site.addsitedir({str(packages)!r})\n"
    own = [f"sys.path.insert(0, {str(ROOT)!r})"] if project else ["sys.modules['modernbert_train'] = None"]
    program = "\n".join(["import sys", *own, start, code])
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=packages, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


CALLBACK = """\
from composer import Callback, Logger, State, Trainer
import streaming

class Mine(Callback):
    def batch_end(self, state, logger):
        pass

print(Mine.__base__.__name__, Trainer.__name__, streaming.StreamingDataset.__name__)
"""


@pytest.mark.runs
def test_a_users_callback_can_be_written_and_tested_here(packages: Path) -> None:
    """Composer is unusable in one's own files otherwise: there is no torchvision, and its import wants one."""
    done = run(packages, CALLBACK)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Callback Trainer StreamingDataset\n"


@pytest.mark.runs
def test_the_real_torchvision_wins(packages: Path) -> None:
    """Whoever installs one that fits wants it used."""
    for module, names in import_stubs._STUBS["torchvision"].items():
        folder = packages / module.replace(".", "/")
        folder.mkdir()
        lines = [f"class {name}: real = True" for name in names]
        (folder / "__init__.py").write_text("\n".join(["__version__ = '9.9'", *lines]), encoding="utf-8")
    composer = packages / "composer"
    composer.mkdir()
    (composer / "__init__.py").write_text("from torchvision.datasets import VisionDataset", encoding="utf-8")
    done = run(packages, "import composer; print(composer.__file__, composer.VisionDataset.real)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{composer}/__init__.py True\n"


@pytest.mark.runs
def test_nothing_is_imported_or_found_before_composer_is(packages: Path) -> None:
    """The file is read by every program of the environment; transformers would ask a stand-in for what it has not."""
    code = """\
from importlib.util import find_spec
assert find_spec("composer") is not None
print(find_spec("torchvision") is None, *sorted({"torch", "torchmetrics", "composer"} & set(sys.modules)))
"""
    done = run(packages, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{PathFinder.find_spec('torchvision') is None}\n"


@pytest.mark.runs
def test_without_the_project_the_file_is_silent(packages: Path) -> None:
    """It outlives an uninstall, and must not print at every start of Python."""
    done = run(packages, "print('here')", project=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")


def test_the_command_writes_it_beside_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(import_stubs.sysconfig, "get_path", lambda name: str(tmp_path) if name == "purelib" else None)
    monkeypatch.setattr(sys, "argv", ["compat", "--environment"])
    import_stubs._main()
    [file] = tmp_path.iterdir()
    assert file.suffix == ".pth" and len(file.read_text(encoding="utf-8").splitlines()) == 1
