"""requirements/install.sh with a fake Python: its calls, the absence of calls, and the state after a kill."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Replaces the base Python and, copied into the environment, the environment's Python: logs its arguments, creates an
# "environment", and fails as the file `fail` says.
FAKE = """#!/bin/sh
case "$*" in
-c*) exit 0 ;;
esac
echo "$*" | sed "s#$HERE#.#g" >>"$HERE/calls"
case "$*" in *"$(cat "$HERE/fail")"*) exit 1 ;; esac
case "$*" in
"-m venv"*)
    for venv; do :; done
    case "$*" in *--clear*) rm -rf "$venv/lib" "$venv/bin" "$venv/.modernbert-train" ;; esac
    mkdir -p "$venv/bin" "$venv/lib"
    cp "$0" "$venv/bin/python"
    ;;
"-m pip config list") cat "$HERE/pip-config" 2>/dev/null || true ;;
esac
"""


LIST = "-m pip install --no-deps --require-hashes -r ./requirements/pinned.txt"
ITSELF = "-m pip install --no-deps --no-build-isolation -e ."
HOOK = "-m modernbert_train.import_stubs --environment"
WHOLE = ["-m venv ./venv", "-m pip install torch==2.13.0", LIST, ITSELF, HOOK]
UV = [
    "-m pip install --quiet uv==0.13.8",
    "-m uv --no-config pip install --python ./venv/bin/python --torch-backend cpu torch==2.13.0",
]


class Machine:
    """A copy of the requirements, a pretended Python, settings of pip, and no GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        (folder / "bin").mkdir()
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        (folder / "pyproject.toml").write_text("")
        (folder / "pip-config").write_text("global.index-url='somewhere'\n")
        self.program("python3", FAKE)
        self.program("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def install(self, *, code: int = 0, fail: str = "nothing", **environment: str) -> list[str]:
        """Return Python's calls, without queries that change nothing; those that contain `fail` fail."""
        (self.folder / "calls").write_text("")
        (self.folder / "fail").write_text(fail)
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = ["sh", str(self.folder / "requirements/install.sh"), str(self.venv)]
        base = {"PATH": path, "HERE": str(self.folder)}
        self.done = subprocess.run(command, env=base | environment, capture_output=True, text=True, check=False)
        assert self.done.returncode == code, self.done.stderr
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line not in ("-m pip --version", "-m pip config list")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.runs
def test_only_what_has_changed_is_installed(machine: Machine) -> None:
    """`make test` calls it each time; a new list or another torch is installed over the old one."""
    assert machine.install() == WHOLE
    assert machine.install() == []
    with (machine.folder / "requirements/pinned.txt").open("a") as pinned:
        pinned.write("more==1.0\n")
    assert machine.install() == WHOLE[1:]
    assert machine.install(MODERNBERT_TORCH="torch==2.14.0") == ["-m pip install torch==2.14.0", *WHOLE[2:]]


@pytest.mark.runs
@pytest.mark.parametrize(
    "step", ["-m venv", "torch==2.13.0", "--require-hashes", "--no-build-isolation", "--environment"]
)
def test_an_install_that_stopped_anywhere_is_made_again(machine: Machine, step: str) -> None:
    """A package half written looks installed to pip; only an empty environment is sure."""
    machine.install(code=1, fail=step)
    (machine.venv / "lib").mkdir(exist_ok=True)
    (machine.venv / "lib" / "half").write_text("")
    assert machine.install() == ["-m venv --clear ./venv", *WHOLE[1:]]
    assert "did not finish" in machine.done.stdout
    assert not (machine.venv / "lib" / "half").exists()
    assert machine.install() == []


@pytest.mark.runs
def test_an_environment_made_by_someone_else_is_never_emptied(machine: Machine) -> None:
    """VENV may name an environment with other work in it."""
    (machine.venv / "bin").mkdir(parents=True)
    shutil.copy(machine.folder / "bin/python3", machine.venv / "bin/python")
    machine.install(code=1, fail="--require-hashes")
    assert machine.install() == WHOLE[1:]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("fail", "gpus", "calls"),
    [
        ("nothing", "exit 9", [WHOLE[0], *UV, *WHOLE[2:]]),  # else a laptop downloads gigabytes of CUDA
        ("--torch-backend", "exit 9", [WHOLE[0], *UV, *WHOLE[1:]]),
        ("nothing", "exit 0", WHOLE),
    ],
    ids=["cpu", "no-build-for-the-cpu", "gpu"],
)
def test_without_settings_of_pip_the_build_is_the_machines(
    machine: Machine, fail: str, gpus: str, calls: list[str]
) -> None:
    (machine.folder / "pip-config").unlink()
    machine.program("nvidia-smi", f"#!/bin/sh\n{gpus}\n")
    assert machine.install(fail=fail) == calls


@pytest.mark.runs
def test_no_fitting_python_says_what_to_do(machine: Machine) -> None:
    assert machine.install(code=1, PYTHON="/nowhere/python3") == []
    said = machine.done.stderr
    assert "no Python 3.11, 3.12 or 3.13 with the venv module among: /nowhere/python3" in said
    assert "PYTHON=/path/to/python3" in said


@pytest.mark.runs
def test_an_image_keeps_its_packages_when_only_the_project_changes(machine: Machine) -> None:
    """The packages are many gigabytes; a build without the layer that has them downloads all again."""
    (machine.folder / "pyproject.toml").unlink()
    assert machine.install(MODERNBERT_LIST="image.txt") == [*WHOLE[:2], LIST.replace("pinned", "image")]
    (machine.folder / "pyproject.toml").write_text("")
    calls = machine.install(MODERNBERT_LIST="image.txt")
    assert calls[-2:] == [ITSELF, HOOK] and WHOLE[0] not in calls
    assert machine.install(MODERNBERT_LIST="image.txt") == []


@pytest.mark.runs
def test_without_a_folder_it_says_what_is_missing(machine: Machine) -> None:
    done = subprocess.run(["sh", str(machine.folder / "requirements/install.sh")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "give the folder of the environment" in done.stderr
