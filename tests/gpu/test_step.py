"""Requirements of a step at full speed: no wait for the device, and perhaps capture into a CUDA graph."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.support.gpu_parts import DEVICE, GPU_TEST, build, make_batch, need_kernel, needs_gpu, small, training_step
from tests.support.paths import ROOT

pytestmark = [*GPU_TEST, needs_gpu]

from modernbert_train.optim.groups import decay_groups, weights_of
from modernbert_train.optim.stable_adamw import StableAdamW

ROW = 1024


@pytest.mark.parametrize(
    ("attention", "compiled"), [("varlen", False), ("varlen", True), ("flash", False), ("flex", False)], ids=str
)
def test_nothing_in_a_step_waits_for_the_device(attention: str, compiled: bool) -> None:
    """A wait leaves the GPU idle while Python catches up; torch refuses every one it knows of, here in the transfer of
    the batch, the forward and the backward pass, and the optimizer."""
    need_kernel(attention, bf16=True)
    torch._dynamo.reset()
    config = small()
    model = build(config, attention=attention)
    if compiled:
        model.compile_layers()
    optimizer = StableAdamW(decay_groups(weights_of(model), 1e-5), 1e-4)
    on_host = [make_batch([400, 300, seed + 1], ROW, config.vocab_size, seed=seed).to("cpu") for seed in range(4)]
    pinned = [batch.with_tensors([tensor.pin_memory() for tensor in batch.tensors()]) for batch in on_host]
    for batch in pinned[:2]:
        training_step(model, optimizer, batch.to(DEVICE, non_blocking=True))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in pinned[2:]:
            training_step(model, optimizer, batch.to(DEVICE, non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any((~torch.isfinite(parameter)).any() for parameter in model.parameters())


@pytest.fixture(scope="module")
def captures() -> dict[bool, dict[str, Any]]:
    """Return the result of a separate process; a capture that breaks can leave the device unusable."""
    command = [sys.executable, "-m", "tests.gpu.capture"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    lost = {"failed": f"the process ended with {done.returncode}: {done.stderr[-300:]}"}
    return {False: lost, True: lost} | {each["compiled"]: each for each in found}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_microbatch_is_captured_into_a_cuda_graph(captures: dict[bool, dict[str, Any]], compiled: bool) -> None:
    """An experiment: forward and backward pass as one graph, replayed with other documents. That it cannot be captured
    is an expected failure with torch's reason; that a replay gives another gradient is not."""
    need_kernel("varlen", bf16=True)
    found = captures[compiled]
    if "failed" in found:
        pytest.xfail(f"not captured: {found['failed']}")
    assert found["loss"] < 1e-3 and found["gradient"] < 2e-2, found
