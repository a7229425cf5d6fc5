"""Whole runs through `train` on the device: FSDP2, and a killed run that resumes."""

from __future__ import annotations

import importlib.util
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_parts import DEVICE, GPU_TEST, ON_GPU, needs_gpu
from tests.support.tiny_run import TinyRun

pytestmark = GPU_TEST

for needed in ("composer", "streaming", "tokenizers"):
    if importlib.util.find_spec(needed) is None:  # importorskip would import Composer before it is prepared for torch
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

from modernbert_train.__main__ import main
from modernbert_train.train import adapters, build_trainer, session
from tests.support import runs

COMMON = [f"compute.device={DEVICE.type}", "data.num_workers=0", *(["compute.precision=bf16"] if ON_GPU else [])]
PROGRAM = """
import sys
from modernbert_train.__main__ import main

sys.exit(main())
"""


def test_fsdp2_trains_on_one_rank_as_no_sharding_does(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps through FSDP2 with NCCL: the wrapping, autocast within it, the optimizer on shards and the checkpoint
    work on a GPU. With one rank `train` would leave FSDP2 out, so it is forced."""
    short = [*COMMON, "phases.long=null", "phases.short={tokens: 1200, batch_warmup: null}", "data.validation=null"]
    assert main(["train", *tiny_run(*short, "name=whole")]) == 0
    for module in (adapters, build_trainer):
        monkeypatch.setattr(module, "is_sharded", lambda config, num_ranks: True)
    sharded: list[bool] = []
    check = build_trainer.assert_sharded
    monkeypatch.setattr(build_trainer, "assert_sharded", lambda *given: sharded.append(check(*given) is None))
    assert main(["train", *tiny_run(*short, "name=sharded", "distributed.strategy=fsdp2")]) == 0
    assert sharded == [True]
    share = 2e-2 if ON_GPU else 1e-5
    apart = {"loss": share, "grad_norm": share, "update_norm": share}
    runs.assert_alike(tmp_path / "runs/sharded", tmp_path / "runs/whole", apart, least=3)


@pytest.mark.timeout(280)
def test_a_killed_run_resumes_as_if_nothing_had_happened(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in the middle, then the same command: with compute.deterministic bit for bit the same record,
    validation and weights, in bf16, with dropout, despite the allocator and atomic additions."""
    monkeypatch.setattr(runs, "TRAIN", [sys.executable, "-c", PROGRAM, "train"])
    words = [*COMMON, "compute.deterministic=true", "model.attention_out_dropout=0.1", "checkpoint.interval_steps=2"]
    whole, broken = tmp_path / "runs/whole", tmp_path / "runs/broken"
    code, output = runs.finish(tiny_run(*words, "name=whole"))
    assert code == 0, output
    assert runs.interrupt_after(tiny_run(*words, "name=broken"), broken, 5, signal.SIGKILL) == -signal.SIGKILL
    code, output = runs.finish(tiny_run(*words, "name=broken"))
    assert code == 0, output
    assert runs.records(broken, "resume")
    runs.assert_equal_runs(broken, whole)


@needs_gpu
def test_a_run_waits_for_the_device_once_a_step(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composer's loop, the guard, the optimizer and the record: torch warns of each wait it knows of, and from one step
    to the next there is the guard's. The batches come from a worker, pinned."""
    from composer import Callback

    first, last, waits = 4, 10, []

    class Watch(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            watched = first <= state.timestamp.batch.value < last
            torch.cuda.set_sync_debug_mode("warn" if watched else "default")

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.append("".join(traceback.format_stack(limit=8)))

    monkeypatch.setattr(session, "build_callbacks", lambda *given: [Watch()])
    words = ["compute.device=cuda", "compute.precision=bf16", "data.num_workers=1", "data.validation=null"]
    words += ["phases.long=null", "phases.short={tokens: 6000, batch_warmup: null}"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", note)
        try:
            assert main(["train", *tiny_run(*words)]) == 0
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(runs.records(tmp_path / "runs/tiny")) > last
    assert len(waits) == last - first, "\n\n".join(waits)
