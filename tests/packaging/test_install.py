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
if [ -e "$HERE/fail" ]; then case "$*" in *"$(cat "$HERE/fail")"*) exit 1 ;; esac; fi
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


class Machine:
    """A copy of the requirements, a pretended Python, and no GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        (folder / "bin").mkdir()
        shutil.copytree(ROOT / "requirements", folder / "requirements")
        (folder / "pyproject.toml").write_text("")
        self.program("python3", FAKE)
        self.program("nvidia-smi", "#!/bin/sh\nexit 9\n")

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = ["sh", str(self.folder / "requirements/install.sh"), str(self.venv)]
        base = {"PATH": path, "HERE": str(self.folder)}
        return subprocess.run(command, env=base | environment, capture_output=True, text=True, check=False)

    def calls(self) -> list[str]:
        """Return Python's calls since the last look, without queries that change nothing."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if line not in ("-m pip --version", "-m pip config list")]


LIST = "-m pip install --no-deps --require-hashes -r ./requirements/pinned.txt"
ITSELF = "-m pip install --no-deps --no-build-isolation -e ."
HOOK = "-m modernbert_train.import_stubs --environment"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    (tmp_path / "pip-config").write_text("global.index-url='somewhere'\n")
    return made


@pytest.mark.runs
def test_a_second_call_installs_nothing(machine: Machine) -> None:
    """`make test` calls it each time."""
    assert machine.install().returncode == 0
    assert machine.calls() == ["-m venv ./venv", "-m pip install torch==2.13.0", LIST, ITSELF, HOOK]
    assert machine.install().returncode == 0
    assert machine.calls() == []


@pytest.mark.runs
def test_a_new_list_or_another_torch_is_installed_over_the_old_one(machine: Machine) -> None:
    machine.install()
    machine.calls()
    with (machine.folder / "requirements/pinned.txt").open("a") as pinned:
        pinned.write("more==1.0\n")
    machine.install()
    assert machine.calls() == ["-m pip install torch==2.13.0", LIST, ITSELF, HOOK]
    machine.install(MODERNBERT_TORCH="torch==2.14.0")
    assert machine.calls() == ["-m pip install torch==2.14.0", LIST, ITSELF, HOOK]


@pytest.mark.runs
@pytest.mark.parametrize(
    "step", ["-m venv", "torch==2.13.0", "--require-hashes", "--no-build-isolation", "--environment"]
)
def test_an_install_that_stopped_anywhere_is_made_again(machine: Machine, step: str) -> None:
    """A package half written looks installed to pip; only an empty environment is sure."""
    (machine.folder / "fail").write_text(step)
    assert machine.install().returncode != 0
    machine.calls()
    (machine.folder / "fail").unlink()
    (machine.venv / "lib").mkdir(exist_ok=True)
    (machine.venv / "lib" / "half").write_text("")
    done = machine.install()
    assert done.returncode == 0
    assert "did not finish" in done.stdout
    assert machine.calls() == ["-m venv --clear ./venv", "-m pip install torch==2.13.0", LIST, ITSELF, HOOK]
    assert not (machine.venv / "lib" / "half").exists()
    machine.install()
    assert machine.calls() == []


@pytest.mark.runs
def test_an_environment_made_by_someone_else_is_never_emptied(machine: Machine) -> None:
    """VENV may name an environment with other work in it."""
    (machine.venv / "bin").mkdir(parents=True)
    shutil.copy(machine.folder / "bin/python3", machine.venv / "bin/python")
    (machine.folder / "fail").write_text("--require-hashes")
    assert machine.install().returncode != 0
    (machine.folder / "fail").unlink()
    machine.calls()
    assert machine.install().returncode == 0
    assert machine.calls() == ["-m pip install torch==2.13.0", LIST, ITSELF, HOOK]


@pytest.mark.runs
def test_no_gpu_and_no_pip_settings_means_the_cpu_build(machine: Machine) -> None:
    """Else a laptop downloads gigabytes of CUDA."""
    (machine.folder / "pip-config").unlink()
    machine.install()
    uv = "-m uv --no-config pip install --python ./venv/bin/python --torch-backend cpu torch==2.13.0"
    assert machine.calls() == ["-m venv ./venv", "-m pip install --quiet uv==0.13.8", uv, LIST, ITSELF, HOOK]


@pytest.mark.runs
def test_where_the_cpu_build_cannot_be_had_plain_pip_is_used(machine: Machine) -> None:
    (machine.folder / "pip-config").unlink()
    (machine.folder / "fail").write_text("--torch-backend")
    assert machine.install().returncode == 0
    assert machine.calls()[-4:] == ["-m pip install torch==2.13.0", LIST, ITSELF, HOOK]


@pytest.mark.runs
def test_a_gpu_gets_what_pip_gives(machine: Machine) -> None:
    (machine.folder / "pip-config").unlink()
    machine.program("nvidia-smi", "#!/bin/sh\nexit 0\n")
    machine.install()
    assert machine.calls()[1] == "-m pip install torch==2.13.0"


@pytest.mark.runs
def test_no_fitting_python_says_what_to_do(machine: Machine) -> None:
    done = machine.install(PYTHON="/nowhere/python3")
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 with the venv module among: /nowhere/python3" in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr
    assert machine.calls() == []


@pytest.mark.runs
def test_an_image_keeps_its_packages_when_only_the_project_changes(machine: Machine) -> None:
    """The packages are many gigabytes; a build without the layer that has them downloads all again."""
    image = LIST.replace("pinned", "image")
    (machine.folder / "pyproject.toml").unlink()
    assert machine.install(MODERNBERT_LIST="image.txt").returncode == 0
    assert machine.calls() == ["-m venv ./venv", "-m pip install torch==2.13.0", image]
    (machine.folder / "pyproject.toml").write_text("")
    assert machine.install(MODERNBERT_LIST="image.txt").returncode == 0
    assert machine.calls()[-2:] == [ITSELF, HOOK] and "-m venv ./venv" not in machine.calls()
    assert machine.install(MODERNBERT_LIST="image.txt").returncode == 0
    assert machine.calls() == []


@pytest.mark.runs
def test_without_a_folder_it_says_what_is_missing(machine: Machine) -> None:
    done = subprocess.run(["sh", str(machine.folder / "requirements/install.sh")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "give the folder of the environment" in done.stderr
