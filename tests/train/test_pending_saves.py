"""A run that ends, or comes to its next checkpoint, while the one before is still being written, on the slowest disk
that there can be: it takes nothing until somebody waits for it.

If this breaks, the last checkpoint of a run is the one that is missing, or an error leaves half of one behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.run import saver as module
from modernbert_train.run.checkpoint import newest_valid, verify
from modernbert_train.run.saver import Saver
from modernbert_train.run.verified import partial_folders, step_folders, step_of
from modernbert_train.train import checkpointing
from modernbert_train.train.callbacks import Measure
from tests import warm
from tests.conftest import TinyRun
from tests.data.test_faults import ROOT, run_ranks

pytestmark = [pytest.mark.runs, pytest.mark.timeout(200)]
EVERY_FOUR = ("checkpoint.interval_steps=4", "checkpoint.keep=99", "data.validation=null")


class Disk:
    """Takes what a checkpoint holds only once somebody waits for it, and then a while later.

    Attributes:
        on_write: is called in the thread that writes, with the number of the checkpoint, from 1.
        awaited: checkpoints that were waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_write: Callable[[int], object] = lambda number: None
        self.awaited = self._number = 0
        self._waiting = threading.Event()
        start, wait, write = Saver.start, Saver.wait, module.write_part

        def started(saver: Saver, *args: Any) -> None:
            self._waiting.clear()
            start(saver, *args)

        def waited(saver: Saver) -> None:
            if saver._thread is not None:
                self.awaited += 1
                self._waiting.set()
            wait(saver)

        def written(*args: Any) -> Any:
            self._number += 1
            self.on_write(self._number)
            assert self._waiting.wait(60), "nobody waits for it"
            threading.Event().wait(0.2)
            return write(*args)

        monkeypatch.setattr(Saver, "start", started)
        monkeypatch.setattr(Saver, "wait", waited)
        monkeypatch.setattr(module, "write_part", written)
        monkeypatch.setattr(checkpointing, "_LONG_SECONDS", 0.1)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    yield Disk(monkeypatch)
    assert not [thread for thread in threading.enumerate() if thread.name == "saver"]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["kind"] == kind]


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints; each must be whole, and nothing may be left beside them."""
    assert partial_folders(folder / "checkpoints") == []
    return [verify(path).step for path in step_folders(folder / "checkpoints")]


def test_a_checkpoint_that_comes_due_waits_for_the_one_before_and_the_last_is_awaited(
    disk: Disk, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule, and the log says so; what is saved, and the run, are those of a fast disk."""
    assert main(["train", *tiny_run(*EVERY_FOUR, "name=slow")]) == 0
    said = capsys.readouterr().out
    slow, fast = tmp_path / "runs/slow", tmp_path / "runs/fast"
    steps = saved_steps(slow)
    assert len(steps) > 3 and steps[-1] == records(slow, "step")[-1]["step"], "the end of the run awaits its last"
    assert disk.awaited == len(steps)
    lines = records(slow, "checkpoint")
    assert [line["step"] for line in lines] == steps
    for line in lines[1:]:
        assert re.search(rf"step {line['step']}: waited \d+\.\d s for the checkpoint before", said), said
        assert 0.1 < line["waited_seconds"] <= line["blocked_seconds"]

    monkeypatch.undo()
    assert main(["train", *tiny_run(*EVERY_FOUR, "name=fast")]) == 0
    assert saved_steps(fast) == steps
    for step in steps:
        one, other = (verify(folder / f"checkpoints/step-{step:08d}") for folder in (slow, fast))
        for name, tensor in one.weights().items():
            assert torch.equal(tensor, other.weights()[name]), (step, name)


def test_a_stop_signal_while_one_is_being_written_awaits_it_and_its_own(
    disk: Disk, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.on_write = lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 2 else None
    assert main(["train", *tiny_run(*EVERY_FOUR)]) == 75
    folder = tmp_path / "runs/tiny"
    steps = saved_steps(folder)
    assert steps[:2] == [4, 8] and len(steps) > 2 and disk.awaited == len(steps)
    assert steps[-1] == records(folder, "step")[-1]["step"], "nothing was trained that is not saved"
    captured = capsys.readouterr()
    assert "checkpoint written" in captured.err and f"step {steps[-1]}: waited" in captured.out
    assert [line["step"] for line in records(folder, "checkpoint")] == steps


def test_an_error_on_one_rank_lets_the_pending_one_be_completed(
    disk: Disk, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Measure.batch_end

    def batch_end(self: Measure, state: Any, logger: Any) -> None:
        real(self, state, logger)
        if state.timestamp.batch.value == 6:
            raise ValueError("planted")

    monkeypatch.setattr(Measure, "batch_end", batch_end)
    assert main(["train", *tiny_run(*EVERY_FOUR)]) == 70
    assert saved_steps(tmp_path / "runs/tiny") == [4]


FAILING = """
import os, sys, threading
from modernbert_train.run import saver
from modernbert_train.train.callbacks import Measure
from modernbert_train.__main__ import main
ranks, writer, seconds = sys.argv[1].split(","), sys.argv[2], float(sys.argv[3])
write, batch_end = saver.write_part, Measure.batch_end

def slow(*args):
    if os.environ["RANK"] == writer:
        threading.Event().wait(seconds)
    return write(*args)

def failing(self, state, logger):
    batch_end(self, state, logger)
    if state.timestamp.batch.value == 6 and os.environ["RANK"] in ranks:
        raise ValueError("planted")

saver.write_part, Measure.batch_end = slow, failing
sys.exit(main(["train", *sys.argv[4:]]))
"""


@pytest.mark.parametrize(
    ("ranks", "writer", "seconds"),
    [
        ("0,1", "1", 60.0),
        ("1", "0", 3.0),
        pytest.param("0", "0", 60.0, marks=pytest.mark.slow),
        pytest.param("1", "1", 1.0, marks=pytest.mark.slow),
    ],
)
def test_an_error_on_several_ranks_ends_all_and_the_pending_one_is_whole_or_not_there(
    tiny_run: TinyRun, tmp_path: Path, ranks: str, writer: str, seconds: float
) -> None:
    """Not one of ours, so another rank may be what the checkpoint waits for: nobody waits. The same command goes on."""
    words = tiny_run(*EVERY_FOUR)
    found = run_ranks("-c", FAILING, ranks, writer, str(seconds), *words)
    folder = tmp_path / "runs/tiny"
    assert [code for code, _ in found] == [70, 70], found
    for rank in ranks.split(","):
        said = found[int(rank)][1]
        assert "ValueError: planted" in said
    first = re.compile(rf"^error: rank ({ranks.replace(',', '|')}) on \S+: ValueError: planted", re.MULTILINE)
    if len(ranks) == 1:
        assert first.search(found[1 - int(ranks)][1]), found
    newest, passed_over = newest_valid(folder / "checkpoints")
    assert passed_over == [] and (newest is None or newest.step == 4)
    if seconds == 60.0:
        assert newest is None, "it cannot have been written"
    command = [sys.executable, "-m", "modernbert_train", "train", *words]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = saved_steps(folder)
    assert steps[0] == 4 and steps[-1] == records(folder, "step")[-1]["step"]
    assert step_of(step_folders(folder / "checkpoints")[-1]) == steps[-1]
