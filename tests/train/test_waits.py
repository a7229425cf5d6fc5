"""Host syncs of a training step: while the host reads a number from a GPU, the GPU becomes idle."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.saver import Saver
from modernbert_train.report.record import Reading
from modernbert_train.train import gradients, recorder, session
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

HOST_READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__")


@contextmanager
def noting_reads(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the names of modules that read a tensor's numbers, one for each read."""
    found: list[str] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(Path(inspect.stack(context=0)[1].filename).stem)
            return original(tensor, *args, **kwargs)

        return read

    for name in HOST_READS:
        patch.setattr(torch.Tensor, name, noted(getattr(torch.Tensor, name)))
    yield found


@pytest.mark.runs
@pytest.mark.parametrize("optimizer", ["stable_adamw", "adamw"])
def test_a_step_waits_for_its_numbers_and_for_nothing_else(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """In a whole step of `train`, Composer's loop and the record included, the host waits only for the numbers that the
    update needs. The norm of the update is copied after it, see report/record.py."""
    from composer import Callback

    steps: list[Counter[str]] = []

    with noting_reads(monkeypatch) as reads:

        class Steps(Callback):
            """Runs after all others except the checkpoint callback, which is not due."""

            def batch_end(self, state: Any, logger: Any) -> None:
                steps.append(Counter(reads))
                reads.clear()

        monkeypatch.setattr(session, "build_callbacks", lambda *given: [Steps()])
        short = ("phases.long=null", "phases.short={tokens: 2400, batch_warmup: null, microbatch_tokens: 64}")
        words = tiny_run(*short, "data.validation=null", "data.num_workers=0", f"optim.name={optimizer}")
        assert main(["train", *words]) == 0
    assert len(steps) > 3
    on_host_anyway = ("sdpa", "optimizer")  # the CPU's kernel, and AdamW's step counts
    expected = {"group": 1, "record": 1} if optimizer == "stable_adamw" else {"group": 1}  # sums_over_ranks
    for step in steps[1:]:
        assert {name: count for name, count in step.items() if name not in on_host_anyway} == expected


def test_what_the_host_counts_goes_to_the_device_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking copy waits for all pending work of a GPU: the previous step's update, in each step."""
    waits: list[bool] = []
    move = torch.Tensor.to

    def noted(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        waits.append(not named.get("non_blocking", False))
        return move(tensor, *given, **named)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    monkeypatch.setattr(gradients, "num_ranks", lambda: 2)
    monkeypatch.setattr(gradients, "sum_over_ranks", lambda totals: None)
    found = gradients.counts_per_rank({"mlm": 6}, torch.device("cpu"))
    assert float(found["mlm"]) == 3 and waits == [False]


class Late(Reading):
    """A number that a GPU has not computed yet when it is requested."""

    waited = 0

    def is_here(self) -> bool:
        return False

    def value(self) -> float:
        Late.waited += 1
        return super().value()


@pytest.mark.runs
def test_lines_that_are_written_a_step_later_are_the_same_record(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step's line waits for the norm of its update. None may be lost, written after a later validation or
    checkpoint, or contain numbers of the next step."""

    def record(name: str) -> list[dict[str, Any]]:
        assert main(["train", *tiny_run(f"name={name}", "phases.long=null", "checkpoint.interval_steps=4")]) == 0
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        timed = ("seconds", "per_second", "wait", "memory", "time")
        return [
            {key: value for key, value in json.loads(line).items() if not any(word in key for word in timed)}
            for line in lines
            if json.loads(line)["kind"] != "checkpoint"  # written when the checkpoint is on the disk
        ]

    expected = record("at-once")
    monkeypatch.setattr(recorder, "Reading", Late)
    assert record("later") == expected
    assert Late.waited == sum(entry["kind"] == "step" for entry in expected) > 8
    assert {entry["kind"] for entry in expected} >= {"step", "validation"}


def test_a_reading_is_the_number_as_it_was() -> None:
    number = torch.tensor(2.5)
    reading = Reading(number)
    number += 1
    assert reading.is_here() and reading.value() == 2.5


@pytest.mark.runs
def test_the_lines_of_all_steps_are_in_the_file_before_their_checkpoint_is_written(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint relies on them: if they were still in memory, a kill would lose them."""
    start, seen = Saver.start, {}

    def look(self: Saver, snapshot: Any) -> None:
        seen[snapshot.step] = [entry["step"] for entry in records(tmp_path / "runs/tiny")]
        start(self, snapshot)

    monkeypatch.setattr(Saver, "start", look)
    monkeypatch.setattr(Reading, "is_here", lambda self: False)  # as on a GPU, which lags behind the host
    short = [
        "phases.short.tokens=900",
        "phases.long.tokens=1000",
        "checkpoint.interval_steps=1",
        "data.validation=null",
    ]
    assert main(["train", *tiny_run(*short)]) == 0
    assert len(seen) > 2 and seen == {step: list(range(1, step + 1)) for step in seen}
