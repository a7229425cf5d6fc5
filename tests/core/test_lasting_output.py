"""Output goes to one place, whole and at once; and a reader that stops costs nothing."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modernbert_train.core.lasting_output import lasting_output
from tests.support import forked
from tests.support.jobs import environment, wait_for_steps
from tests.support.runs import TRAIN, start
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
@pytest.mark.parametrize(
    "verb", ["check", *(pytest.param(each, marks=pytest.mark.slow) for each in ("plan", "inspect"))]
)
def test_a_reader_that_has_seen_enough_may_leave(tiny_run: TinyRun, verb: str) -> None:
    """`check | head -1`: no traceback, and the exit code is the verb's own, as `set -o pipefail` needs it."""
    command = [sys.executable, "-m", "modernbert_train", verb, *tiny_run()]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 0


@pytest.mark.runs
def test_a_log_has_everything_of_a_run_in_order(tiny_run: TinyRun) -> None:
    """`train | tee log`: banner, progress, validations and the result are piped; errors are not."""
    command = [*TRAIN, *tiny_run("logging={progress_bar: true, line_seconds: 0.0001}")]
    done = forked.run(command, env=environment(), capture_output=True, timeout=120)
    said = done.stdout
    assert done.returncode == 0 and done.stderr == ""
    marks = (
        "checking the configuration", "loading torch and Composer ...", "reading the lengths", "building the model ...",
        "tiny: 53,056 parameters", "training the first batch ...", "  loss ", "validation at ", "done: ", "next:",
    )  # fmt: skip
    places = [said.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "\r" not in said and "\x1b" not in said
    assert sum(" tok/s  " in line for line in said.splitlines()) > 10


@pytest.mark.runs
def test_ctrl_c_that_takes_the_tee_along_still_saves(tiny_run: TinyRun, tmp_path: Path) -> None:
    """`train 2>&1 | tee log` and Ctrl-C: both get the signal, tee is gone at once, and the run must not die of that."""
    process = start(tiny_run("phases.short.tokens=400_000"))
    wait_for_steps(tmp_path / "runs/tiny", 1, [process], 100)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert [path.name for path in (tmp_path / "runs/tiny/checkpoints").iterdir() if "." not in path.name]


def test_an_output_of_another_encoding_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console of Windows, or PYTHONIOENCODING=ascii: a token that it cannot print must not end the verb."""
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        with lasting_output():
            print("caf\u00e9")
        sys.stdout.flush()
        assert written.getvalue() == b"caf\\xe9\n"
