"""`plan`'s prediction of a GPU's memory, compared with the allocator's account of real steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.gpu_parts import GPU_TEST, build, make_batch, need_kernel, needs_gpu, training_step

pytestmark = [*GPU_TEST, needs_gpu]

from modernbert_train.config.schema import ComputeConfig, ModernBertConfig, StableAdamWConfig
from modernbert_train.optim.groups import decay_groups, weights_of
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.plan.memory import memory
from modernbert_train.plan.parameters import count_parameters

MICROBATCH = 98_304
ROW = 1024


def documents_of(rows: int) -> list[int]:
    """Documents of a median of 300 tokens that fill rows of 1,024; the rest is pads."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < rows * ROW - ROW:
        lengths.append(int(np.clip(rng.lognormal(np.log(300), 0.8), 8, ROW)))
    return lengths


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_step_takes_the_memory_that_plan_says(compiled: bool) -> None:
    """Base at 1,024 with microbatches of 98,304 tokens: `plan` must match the allocator, or users buy the wrong GPU;
    compiled it must fit one of 80 GB."""
    need_kernel("varlen", bf16=True)
    torch._dynamo.reset()
    config, compute = ModernBertConfig(), ComputeConfig(compile=compiled)
    rows = MICROBATCH // ROW
    batch = make_batch(documents_of(rows), ROW, config.vocab_size, boundaries=1024, rows=rows)
    told = memory(
        config,
        compute,
        count_parameters(config),
        optim=StableAdamWConfig(lr=1e-4),
        bf16=True,
        strategy="ddp",
        shards=1,
        ranks=1,
        tokens=MICROBATCH,
        predicted=len(batch.targets["positions_M"]),
    )
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if 1.15 * told.peak > free:
        pytest.skip(f"needs {1.15 * told.peak / 1e9:.0f} GB of free GPU memory, {free / 1e9:.0f} are there")
    before = torch.cuda.memory_allocated()
    model = build(config)
    if compiled:
        model.compile_layers()
    optimizer = StableAdamW(decay_groups(weights_of(model), 1e-5), 1e-4)
    training_step(model, optimizer, batch)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        training_step(model, optimizer, batch)
    found = torch.cuda.max_memory_allocated() - before
    assert told.peak == pytest.approx(found, rel=0.15), told.parts()
    if compiled:
        assert found < 80e9
