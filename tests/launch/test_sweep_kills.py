"""A sweep whose workers are killed at any time: no work is lost, repeated or stuck.

If this breaks, a night on a cluster with preemptions ends with trials that count as running for ever, or with hours of
finished training lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest
from optuna.trial import TrialState

from launch.sweeps.space import Space, make_space, trial_name
from launch.sweeps.trial_store import REASON, SLOT, Store
from launch.sweeps.worker import Worker
from modernbert_train.errors import StoppedEarly
from tests.launch.fake_run import STEPS, loss
from tests.support.sweeps import FAKE, attempts, log, spec
from tests.support.tiny_run import TinyRun
from tests.support.waiting import until

TRIALS, KILLS = 24, 50


def start_worker(space: Space) -> int:
    """Fork a worker process, so that it need not import everything again."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            Worker(space, FAKE, space.sweep.workers).run()
            code = 0
        except StoppedEarly as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return process


def wait_for_lines(file: Path, lines: int) -> None:
    """Wait for this many more lines; or for a long time, since all trials may wait for a dead worker's timeout."""
    size = file.stat().st_size if file.exists() else 0
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline and (file.stat().st_size if file.exists() else 0) < size + 18 * lines:
        time.sleep(0.005)


def completed(database: Path) -> list[tuple[int, float]]:
    """Return number and figure of completed attempts; opened for writing, since a kill may leave a partial write."""
    words = "SELECT number, value FROM trials JOIN trial_values USING (trial_id) WHERE state = 'COMPLETE'"
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=rw", uri=True, timeout=60)) as connection:
        return connection.execute(words).fetchall()


@pytest.mark.weekly
@pytest.mark.slow
def test_workers_killed_at_fifty_random_moments(tiny_run: TinyRun, tmp_path: Path) -> None:
    sweep = spec(tiny_run(), tmp_path, f"trials={TRIALS}")
    space = make_space(sweep)
    draw = random.Random(7)
    complete: dict[int, float] = {}
    Store(space)  # creates the tables
    workers = [start_worker(space), start_worker(space)]
    for _ in range(KILLS):
        wait_for_lines(tmp_path / "home/log.txt", draw.randrange(10))
        time.sleep(draw.uniform(0, 0.02))
        killed = draw.randrange(2)
        os.kill(workers[killed], signal.SIGKILL)
        os.waitpid(workers[killed], 0)
        for number, value in completed(tmp_path / "home/sweep/sweep.db"):
            assert complete.setdefault(number, value) == value
        workers[killed] = start_worker(space)
    assert [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers] == [0, 0]

    found = attempts(space)
    assert list(found) == list(range(TRIALS))
    for slot, tries in found.items():
        assert [each.state for each in tries].count(TrialState.COMPLETE) == 1, slot
        assert all(each.state in (TrialState.COMPLETE, TrialState.FAIL) for each in tries), slot  # none stuck
        assert all(REASON not in each.user_attrs and each.user_attrs[SLOT] == slot for each in tries)
        assert len({each.params["optim.lr"] for each in tries if each.params}) == 1, slot  # drawn once
        [done] = [each for each in tries if each.state == TrialState.COMPLETE]
        assert done.value == pytest.approx(loss(done.params["optim.lr"], STEPS))
    numbers = {each.number for tries in found.values() for each in tries if each.state == TrialState.COMPLETE}
    assert set(complete) <= numbers  # a completed trial stays complete
    assert complete and sum(map(len, found.values())) > TRIALS  # kills came during trials and after some
    names = [trial_name(slot) for slot in range(TRIALS)]
    assert sorted(log(sweep, "end")) == names  # each trained to its end once
    assert Counter(log(sweep, "step")) == Counter(f"{name} {step}" for name in names for step in range(1, STEPS + 1))
    assert log(sweep, "clash") == []


@pytest.mark.runs
def test_a_stopped_worker_saves_and_the_next_resumes_at_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Otherwise Ctrl-C would cost the timeout of a lost worker, or its trials."""
    sweep = spec(tiny_run(), tmp_path, "trials=2", "workers=2", "heartbeat_seconds=1000")
    space = make_space(sweep)
    (tmp_path / "home/fake.txt").write_text("0 slow\n1 slow")
    worker = start_worker(space)
    until((tmp_path / "home/log.txt").exists)
    until(lambda: len({step.split()[0] for step in log(sweep, "step")}) == 2)
    os.kill(worker, signal.SIGINT)
    _, status = os.waitpid(worker, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert [[each.state for each in tries] for tries in attempts(space).values()] == [[TrialState.FAIL]] * 2
    assert 2 <= len(log(sweep, "step")) < 2 * STEPS and log(sweep, "end") == []
    (tmp_path / "home/fake.txt").write_text("")
    Worker(space, FAKE).run()
    for tries in attempts(space).values():
        assert [each.state for each in tries] == [TrialState.FAIL, TrialState.COMPLETE]
    assert len(log(sweep, "step")) == 2 * STEPS
