"""A run that ends, or reaches its next checkpoint, while the previous one is still being written, on the slowest
possible disk: it writes nothing until someone waits for it.

If this breaks, the last checkpoint of a run is missing, or an error leaves a partial one behind.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints import saver as module
from modernbert_train.checkpoints.checkpoint import newest_valid, verify
from modernbert_train.checkpoints.saver import Saver
from modernbert_train.checkpoints.verified import partial_folders, step_folders, step_of
from modernbert_train.train import checkpointing
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.step import Loop
from tests.support.runs import assert_same_state, finish, records
from tests.support.tiny_run import TinyRun
from tests.support.unwatched_ranks import run_ranks

pytestmark = [pytest.mark.runs, pytest.mark.timeout(200)]
EVERY_FOUR = ("checkpoint.interval_steps=4", "checkpoint.keep=99", "data.validation=null")


class Disk:
    """Writes a checkpoint only once its saver waits for it, and then after a delay.

    Attributes:
        on_write: called in the writing thread, with the number of the checkpoint, from 1.
        awaited: checkpoints that the saver waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_write: Callable[[int], object] = lambda number: None
        self.awaited = self._number = 0
        self._waiting = threading.Event()
        start, wait, write = Saver.start, Saver.wait, module.write_part

        def started(saver: Saver, *args: Any) -> None:
            self._waiting.clear()
            start(saver, *args)

        def waited(saver: Saver, *given: float) -> None:
            if saver._thread is not None:
                self.awaited += 1
                self._waiting.set()
            wait(saver, *given)

        def written(*args: Any) -> Any:
            self._number += 1
            self.on_write(self._number)
            assert self._waiting.wait(60), "the saver never waited"
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


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints; each must be whole, and the folder must hold no other files."""
    assert partial_folders(folder / "checkpoints") == []
    return [verify(path).step for path in step_folders(folder / "checkpoints")]


def test_a_checkpoint_that_comes_due_waits_for_the_one_before_and_the_last_is_awaited(
    disk: Disk, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log reports the wait; checkpoints and run equal those on a fast disk."""
    assert main(["train", *tiny_run(*EVERY_FOUR, "name=slow")]) == 0
    said = capsys.readouterr().out
    slow, fast = tmp_path / "runs/slow", tmp_path / "runs/fast"
    steps = saved_steps(slow)
    assert len(steps) > 3 and steps[-1] == records(slow, "step")[-1]["step"], "the end of the run awaits its last"
    assert disk.awaited == len(steps)
    lines = records(slow, "checkpoint")
    assert [line["step"] for line in lines] == steps
    for line in lines[1:]:
        assert re.search(rf"step {line['step']}: waited \d+\.\d s for the previous checkpoint", said), said
        assert 0.1 < line["waited_seconds"] <= line["blocked_seconds"]

    monkeypatch.undo()
    assert main(["train", *tiny_run(*EVERY_FOUR, "name=fast")]) == 0
    assert saved_steps(fast) == steps
    for step in steps:
        assert_same_state(*(verify(folder / f"checkpoints/step-{step:08d}") for folder in (slow, fast)))


def test_a_stop_signal_while_one_is_being_written_awaits_it_and_its_own(
    disk: Disk, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.on_write = lambda number: os.kill(os.getpid(), signal.SIGTERM) if number == 2 else None
    assert main(["train", *tiny_run(*EVERY_FOUR)]) == 75
    folder = tmp_path / "runs/tiny"
    steps = saved_steps(folder)
    assert steps[:2] == [4, 8] and len(steps) > 2 and disk.awaited == len(steps)
    assert steps[-1] == records(folder, "step")[-1]["step"], "all that was trained is saved"
    captured = capsys.readouterr()
    assert "checkpoint written" in captured.err and f"step {steps[-1]}: waited" in captured.out
    assert [line["step"] for line in records(folder, "checkpoint")] == steps


def test_a_gpu_without_memory_is_reported_with_what_to_set_and_the_pending_one_is_kept(
    disk: Disk, tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the most common error on a GPU and not a bug to report. The next start resumes from the checkpoint."""
    real = ComposerObjective.forward
    seen = [0]

    def forward(self: ComposerObjective, *given: Any, **named: Any) -> Any:
        seen[0] += self.training
        if seen[0] > 21:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 ...")
        return real(self, *given, **named)

    monkeypatch.setattr(ComposerObjective, "forward", forward)
    words = (*EVERY_FOUR, "phases.short.batch_warmup=null", "phases.short.microbatch_tokens=128")
    assert main(["train", *tiny_run(*words)]) == 70
    assert seen == [22], "a given microbatch is not halved"
    said = capsys.readouterr().err
    assert "microbatches of 2 rows of 64 tokens (phases.short.microbatch_tokens=128): CUDA out of memory" in said
    assert re.search(r"error: step \d+ ran out of memory", said)
    assert "Set phases.short.microbatch_tokens=64, or compute.activation_checkpointing=true;" in said
    assert "bug" not in said and "Traceback" not in said
    assert saved_steps(tmp_path / "runs/tiny") == [4]


def test_a_stop_saves_first_and_the_next_start_measures_what_was_due(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler may allow only thirty seconds. The final curve is complete nevertheless."""
    other = f"evals.other={{name: text, shards: {tiny_data}/validation, every_tokens: 1}}"
    given = ("phases.long=null", "eval.times_per_phase=1000", other)
    assert main(["train", *tiny_run("name=whole", *given)]) == 0
    real = Loop.set_clock

    def set_clock(self: Loop, plan: Any) -> None:
        real(self, plan)
        if self.state.timestamp.batch.value == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "set_clock", set_clock)
        assert main(["train", *tiny_run("name=stopped", *given)]) == 75
    stopped = tmp_path / "runs/stopped"
    assert records(stopped, "step")[-1]["step"] == 5 and saved_steps(stopped) == [5]
    for kind in ("validation", "evaluation"):
        assert [line["step"] for line in records(stopped, kind)] == [1, 2, 3, 4]
    assert main(["train", *tiny_run("name=stopped", *given)]) == 0
    for kind, keys in (("validation", ("step", "tokens", "phase", "loss")), ("evaluation", ("step", "figures"))):
        lines = [[{key: line[key] for key in keys} for line in records(tmp_path / "runs" / name, kind)]
                 for name in ("whole", "stopped")]  # fmt: skip
        assert lines[0] == lines[1] and len(lines[0]) > 6


FAILING = """
import os, sys, threading
from modernbert_train.checkpoints import saver
from modernbert_train.train.recorder import Recorder
from modernbert_train.__main__ import main
ranks, writer, seconds = sys.argv[1].split(","), sys.argv[2], float(sys.argv[3])
write, step = saver.write_part, Recorder.step

def slow(*args):
    if os.environ["RANK"] == writer:
        threading.Event().wait(seconds)
    return write(*args)

def failing(self, batch, numbers, number, *given):
    step(self, batch, numbers, number, *given)
    if number == 6 and os.environ["RANK"] in ranks:
        raise ValueError("planted")

saver.write_part, Recorder.step = slow, failing
sys.exit(main(["train", *sys.argv[4:]]))
"""


@pytest.mark.parametrize(
    ("ranks", "writer", "seconds"),
    [
        pytest.param("0,1", "1", 60.0, marks=pytest.mark.slow),
        ("1", "0", 3.0),
        pytest.param("0", "0", 60.0, marks=pytest.mark.slow),
        pytest.param("1", "1", 1.0, marks=pytest.mark.slow),
    ],
)
def test_an_error_on_several_ranks_ends_all_and_the_pending_one_is_whole_or_not_there(
    tiny_run: TinyRun, tmp_path: Path, ranks: str, writer: str, seconds: float
) -> None:
    """The failing rank's peers are alive and write their shares: all that can be written in half the timeout is kept,
    with up to half an hour of training. Then all end; the same command resumes."""
    words = tiny_run(*EVERY_FOUR, "phases.long=null", "distributed.timeout_seconds=20")
    found = run_ranks("-c", FAILING, ranks, writer, str(seconds), *words)
    folder = tmp_path / "runs/tiny"
    assert [code for code, _ in found] == [70, 70], found
    for rank in ranks.split(","):
        said = found[int(rank)][1]
        assert said.count("Traceback (most recent call last)") == 1
        assert said.index("ValueError: planted") < said.index("error: "), "the traceback comes first"
    first = re.compile(rf"^error: rank ({ranks.replace(',', '|')}) on \S+: ValueError: planted", re.MULTILINE)
    if len(ranks) == 1:
        assert first.search(found[1 - int(ranks)][1]), found
    newest, passed_over = newest_valid(folder / "checkpoints")
    assert passed_over == []
    if seconds == 60.0:
        assert newest is None, "it cannot have been written"
    else:
        assert newest is not None and newest.step == 4
    code, output = finish(words)
    assert code == 0, output
    steps = saved_steps(folder)
    assert steps[0] == 4 and steps[-1] == records(folder, "step")[-1]["step"]
    assert step_of(step_folders(folder / "checkpoints")[-1]) == steps[-1]
