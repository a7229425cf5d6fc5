"""SIGTERM, SIGINT and SIGUSR1 at any moment of a program: 75, one line, no traceback; or 0, where it had finished.

If this breaks, a job that is preempted while it starts, which takes minutes for a large checkpoint, ends with a code
that no scheduler starts again.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.conftest import TinyRun
from tests.launch.jobs import environment
from tests.launch.moments import LAUNCH, SIGNALS, VERB, Ended, lifetime, stop_after

MOMENTS = random.Random(13)
TAKEN_OVER = """\
import signal
from modernbert_train import stop_signals
stop_signals.take_over()
ours = [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS]
import modernbert_train.train.build, modernbert_train.train.finished, modernbert_train.inspection.show
import modernbert_train.export.fill, modernbert_train.doctor, modernbert_train.plan.make, modernbert_train.report
import launch.ranks
assert ours == [signal.getsignal(number) for number in stop_signals.STOP_SIGNALS], "an import took them away"
signal.raise_signal(signal.SIGTERM)
"""


def check_end(ended: Ended) -> None:
    assert ended.code == 75 or (ended.code == 0 and "error" not in ended.errors), ended
    assert "Traceback" not in ended.errors and "warning" not in ended.errors.lower(), ended
    assert ended.code == 0 or len(ended.errors.splitlines()) <= 3, ended


def stop_at_random(
    command: Sequence[str], folder: Path, span: float, times: int, renew: tuple[Path, Path] | None = None
) -> list[tuple[float, str, int]]:
    """Stop a program at so many moments; returns each moment with the signal and the code."""
    table = []
    for number in range(times):
        if renew is not None:
            shutil.rmtree(renew[1], ignore_errors=True)
            shutil.copytree(*renew)
        moment = span * (number + MOMENTS.random()) / times
        which = SIGNALS[number % len(SIGNALS)]
        ended = stop_after(command, folder, moment, which)
        print(f"{moment:6.2f} s  {which.name:7}  {ended.code}  {ended.errors.strip()[:200]!r}", flush=True)
        check_end(ended)
        table.append((moment, which.name, ended.code))
    return table


def test_no_import_takes_the_signals_away(tmp_path: Path) -> None:
    """Composer replaces the handlers when it is imported: a job preempted while it starts then ended with 143."""
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_OVER], env=environment(), capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 75, done
    assert done.stderr == "SIGTERM: stopped. The same command starts again.\n"


@pytest.mark.timeout(250)
@pytest.mark.parametrize("place", ["", "runs/tiny", "runs/tiny/metrics.jsonl"])
def test_training_can_be_stopped_while_it_starts(tiny_run: TinyRun, tmp_path: Path, place: str) -> None:
    """At once; with Composer imported and no step computed, where the code used to be 143; with the first line."""
    words = tiny_run("data.num_workers=1", "phases.short.tokens=400000")
    ended = stop_after([*VERB, "train", *words], tmp_path, 0.0, SIGNALS[len(place) % 2], tmp_path / place)
    check_end(ended)
    assert ended.code == 75


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_training_can_be_stopped_at_thirty_six_moments(tiny_run: TinyRun, tmp_path: Path) -> None:
    """From the first line of main over the imports, the restore of a checkpoint, the last steps and the end."""
    words = tiny_run("data.num_workers=1")
    folder, kept = tmp_path / "runs/tiny", tmp_path / "kept"
    assert main(["train", *words]) == 0
    for path in folder.glob("checkpoints/step-*14"):
        shutil.rmtree(path)
    shutil.copytree(folder, kept)
    span = lifetime([*VERB, "train", *words], tmp_path)
    table = stop_at_random([*VERB, "train", *words], tmp_path, 1.1 * span, 36, (kept, folder))
    assert {code for _, _, code in table} == {0, 75}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", ["eval", "export", "check", "plan", "inspect", "report"])
def test_every_verb_can_be_stopped(tiny_run: TinyRun, tmp_path: Path, verb: str) -> None:
    words = tiny_run()
    assert main(["train", *words]) == 0
    command = [*VERB, verb, *words, *(["--out", str(tmp_path / "out")] if verb == "export" else [])]
    span = lifetime(command, tmp_path)
    for _ in range(6):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        stop_at_random(command, tmp_path, 1.1 * span, 1)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_launcher_can_be_stopped_at_any_moment(tiny_run: TinyRun, tmp_path: Path, ranks: str) -> None:
    words = tiny_run("data.num_workers=1")
    command = [*LAUNCH, *words, "--ranks", ranks]
    empty = tmp_path / "empty"
    empty.mkdir()
    span = lifetime(command, tmp_path)
    stop_at_random(command, tmp_path, 1.1 * span, 14, (empty, tmp_path / "runs"))
