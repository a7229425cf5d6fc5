"""Leftovers in a shell or folder: variables of another launcher, and files named like Python's modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modernbert_train.distributed.launched import STORE, check_launch_variables
from modernbert_train.errors import ConfigError
from tests.support.corpora import write
from tests.support.paths import ROOT
from tests.support.tiny_run import RANK_VARIABLES, TinyRun

COMMAND = str(Path(sys.executable).parent / "modernbert-train")
LEFT_OVER = {
    "a number of ranks": ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 in the environment without RANK, LOCAL_RANK, MASTER_"),
    "an empty one": ({"WORLD_SIZE": "", "RANK": ""}, "RANK='' in the environment: a launcher sets a whole"),
    "no meeting place": (
        {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE=8 in the environment without MASTER_ADDR",
    ),
    "an empty place on the machine": ({"LOCAL_RANK": ""}, "LOCAL_RANK='' in the environment: a launcher sets a whole"),
    "a port that is none": (
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "z"}, "MASTER_PORT='z' in the environment: a launcher sets",
    ),
    "a rank beyond the last": ({"WORLD_SIZE": "1", "RANK": "3"}, "RANK=3 with WORLD_SIZE=1 in the environment"),
}  # fmt: skip


def outside(**more: str) -> dict[str, str]:
    """Return the environment without a launcher's variables, and with some others."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | more


@pytest.mark.parametrize("case", LEFT_OVER)
def test_a_variable_that_another_launcher_left_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    variables, message = LEFT_OVER[case]
    for name in (*RANK_VARIABLES, STORE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        check_launch_variables()
    assert str(error.value).startswith(message) and "unset RANK" in str(error.value)


@pytest.mark.runs
@pytest.mark.parametrize("left", [{"WORLD_SIZE": "8"}, {"LOCAL_RANK": ""}], ids=["world", "local"])
def test_train_says_which_variable_is_left_over(tiny_run: TinyRun, tmp_path: Path, left: dict[str, str]) -> None:
    """As typed, from another folder: it used to be an error of Composer's import, and "this is a bug"."""
    ((name, value),) = left.items()
    command = [COMMAND, "train", *tiny_run()]
    ended = subprocess.run(command, cwd=tmp_path, env=outside(**left), capture_output=True, text=True)
    assert ended.returncode == 78 and f"{name}={value or repr('')} in the env" in ended.stderr, ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with a file that is named like a module of Python's."""
    (tmp_path / "random.py").write_text('raise RuntimeError("the user\'s own")\n', encoding="utf-8")
    return tmp_path


def succeed(folder: Path, command: list[str], environment: dict[str, str]) -> str:
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.runs
def test_a_verb_that_is_a_program_keeps_the_safe_path(folder: Path) -> None:
    """`python -P -m modernbert_train prepare` starts another module, whose path must be as safe."""
    command = [sys.executable, "-P", "-m", "modernbert_train", "prepare", "--help"]
    succeed(folder, command, outside(PYTHONPATH=str(ROOT)))


@pytest.mark.runs
def test_ranks_do_not_import_a_users_files_named_as_pythons(tiny_run: TinyRun, folder: Path) -> None:
    """The installed command does not import from the current folder, and neither do its children."""
    words = tiny_run("phases.long=null", "phases.short.tokens=1500", "phases.short.schedule.decay_tokens=0")
    succeed(folder, [COMMAND, "launch", *words, "--ranks", "2"], outside())


@pytest.mark.runs
def test_the_speed_that_pretrain_measures_does_not_need_the_users_files_either(folder: Path) -> None:
    """Without a PYTHONPATH the measuring process had an empty entry in its own, which is the current folder."""
    for number in range(30):
        write(folder, f"texts/{number}.txt", f"The text of document {number} has a few words. " * 50)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from launch.pretrain import main; sys.exit(main())"
    words = ["texts", "--size", "tiny", "--tokens", "100000", "--dry-run"]
    environment = outside(PYTHONSAFEPATH="1")  # as the installed command sets it for its children
    environment.pop("PYTHONPATH", None)
    assert "measured on these" in succeed(folder, [sys.executable, "-P", "-c", code, *words], environment)
