"""SIGTERM, SIGINT and SIGUSR1 at any time of a program: 75, one line, no traceback; or 0 if it had finished.

If this breaks, a job that is preempted while it starts, which takes minutes for a large checkpoint, ends with a code
that prevents a restart.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.launch.moments import LAUNCH, SIGNALS, VERB, Ended, lifetime, stop_after
from tests.support.tiny_run import TinyRun

AT_ONCE = 4


def check_end(ended: Ended) -> None:
    assert ended.code == 75 or (ended.code == 0 and "error" not in ended.errors), ended
    assert "Traceback" not in ended.errors and "warning" not in ended.errors.lower(), ended
    assert sum(line.startswith("SIG") for line in ended.errors.splitlines()) <= 1, ended


def stop_at_random(commands: Sequence[list[str]], folder: Path) -> list[int]:
    """Stop programs that take equally long, four at a time; return their codes.

    Args:
        commands: the first four run to their end, to measure the duration; the others are signalled, at times spread
            from the first line of main to a little beyond the end.
        folder: gets a working directory for each program.
    """
    draw, times, codes = random.Random(13), len(commands) - AT_ONCE, []
    homes = [folder / f"{number}-home" for number in range(len(commands))]
    for home in homes:
        home.mkdir()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        span = 1.1 * max(pool.map(lifetime, commands[:AT_ONCE], homes))
        moments = [span * (number + draw.random()) / times for number in range(times)]
        which = [SIGNALS[number % len(SIGNALS)] for number in range(times)]
        ends = pool.map(stop_after, commands[AT_ONCE:], homes[AT_ONCE:], moments, which)
        for moment, number, ended in zip(moments, which, ends, strict=True):
            print(f"{moment:6.2f} s  {number.name:7}  {ended.code}  {ended.errors.strip()[:150]!r}", flush=True)
            check_end(ended)
            codes.append(ended.code)
    return codes


@pytest.mark.runs
@pytest.mark.parametrize("place", ["", pytest.param("runs/tiny", marks=pytest.mark.slow)])
def test_training_can_be_stopped_while_it_starts(tiny_run: TinyRun, tmp_path: Path, place: str) -> None:
    """At once, and with Composer imported, which replaces the handlers: before the first step it ended with 143."""
    words = tiny_run("data.num_workers=1", "phases.short.tokens=400000")
    ended = stop_after([*VERB, "train", *words], tmp_path, 0.0, SIGNALS[len(place) % 2], tmp_path / place)
    check_end(ended)
    assert ended.code == 75


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_training_can_be_stopped_at_thirty_six_moments(tiny_run: TinyRun, tmp_path: Path) -> None:
    """From the first line of main over the imports, the restore of a checkpoint, the last steps and the end."""
    assert main(["train", *tiny_run()]) == 0
    kept = tmp_path / "runs/tiny"
    (last,) = kept.glob("checkpoints/step-*14")
    shutil.rmtree(last)
    words = tiny_run("data.num_workers=1")
    commands = [[*VERB, "train", *words, f"name=run{number}"] for number in range(36 + AT_ONCE)]
    for number in range(len(commands)):
        shutil.copytree(kept, tmp_path / f"runs/run{number}")
    assert set(stop_at_random(commands, tmp_path)) == {0, 75}


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_verb_can_be_stopped(tiny_run: TinyRun, tmp_path: Path) -> None:
    assert main(["train", *tiny_run()]) == 0
    for verb in ("eval", "export", "check", "plan", "inspect", "report"):
        (tmp_path / verb).mkdir()
        command = [*VERB, verb, *tiny_run()]
        out = [["--out", str(tmp_path / verb / f"{number}.out")] for number in range(AT_ONCE + 6)]
        print(verb)
        stop_at_random([[*command, *(words if verb in ("export", "report") else [])] for words in out], tmp_path / verb)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_launcher_can_be_stopped_at_any_moment(tiny_run: TinyRun, tmp_path: Path, ranks: str) -> None:
    words = [*tiny_run("data.num_workers=1"), "--ranks", ranks]
    stop_at_random([[*LAUNCH, *words, f"name=run{number}"] for number in range(AT_ONCE + 12)], tmp_path)
