"""A run that was stopped and resumed equals one that never was, to the bit, on any number of ranks.

If this breaks, a restart is a fork in the road: the run after it is not the one that was compared, tuned and reported.
The model fills several of DDP's buckets, whose order DDP changes after the first step of a process if it may.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.distributed.bf16 import cpu_has_bf16
from tests.support.gloo import run_ranks
from tests.support.ranks import HSDP, train_each
from tests.support.runs import newest, records
from tests.support.tiny_run import TinyRun

pytestmark = pytest.mark.runs

SEVERAL_BUCKETS = "model={hidden_size: 112, num_layers: 4, num_heads: 4, intermediate_size: 160}"
BUCKET_BYTES = 1 << 20  # of DDP's first one
WORDS = (
    *(SEVERAL_BUCKETS, "model.attention_out_dropout=0.1", "checkpoint.interval_steps=2", "checkpoint.keep=100"),
    *("phases.short.tokens=3000", "phases.short.batch_rows=12", "phases.short.batch_warmup=null"),
    *("phases.short.microbatch_tokens=64", "phases.long.batch_rows=12", "data.validation=null"),
)
FIRST = 2  # the step that is resumed from
NEEDS_BF16 = pytest.mark.skipif(not cpu_has_bf16(), reason="a processor with bf16")
FSDP2 = ("distributed.strategy=fsdp2",)


def trained(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The results of a run: its steps without times, and its last weights and moments."""
    steps = records(folder)
    last = newest(folder)
    assert last.step == steps[-1]["step"] == len(steps)
    return steps, last.weights() | last.optimizer()


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        pytest.param(3, (), id="3 ranks, DDP"),
        pytest.param(2, ("compute.precision=bf16",), id="2 ranks, bf16", marks=NEEDS_BF16),
        *(
            pytest.param(ranks, words, id=f"{ranks} ranks, {name}", marks=pytest.mark.slow)
            for ranks, name, words in (
                *((1, "alone", ()), (2, "DDP", ()), (4, "DDP", ())),
                *((2, "FSDP2", FSDP2), (3, "FSDP2", FSDP2), (4, "FSDP2", FSDP2), (4, "HSDP", HSDP)),
                (4, "DDP, parameters idle", ("objective.name=rtd",)),
            )
        ),
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    tiny_run: TinyRun, tmp_path: Path, ranks: int, strategy: tuple[str, ...]
) -> None:
    """Each start in new processes, with several microbatches on each rank, from the middle of the first phase."""
    folder = tmp_path / "runs/tiny"
    words = tiny_run(*WORDS, *strategy)
    run_ranks(train_each, ranks, [words], False, timeout_seconds=140)
    steps, tensors = trained(folder)
    assert sum(4 * tensor.numel() for tensor in tensors.values()) > 3 * 1.5 * BUCKET_BYTES  # weights and two moments
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > FIRST:
            shutil.rmtree(path)

    run_ranks(train_each, ranks, [words], False, timeout_seconds=140)
    assert [each["step"] for each in records(folder, "resume")] == [FIRST]
    again, tensors_again = trained(folder)
    assert len(steps) > FIRST + 3 and {each["phase"] for each in steps} == {"short", "long"}
    assert again == steps
    assert tensors_again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensors_again[name], tensor), name
