"""`train` on the null device: python -m tests.cuda_build.train_step FOLDER CASE ..., see `train`.

The whole program, from the configuration to the last checkpoint; under ddp and fsdp2 as rank 0 of two, under hsdp of
four, through torch's NCCL and the null device's. Prints the device calls of a step, as JSON. A process has one group of
ranks, so hsdp needs a separate process.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from composer import Callback
from composer.utils import dist as composer_dist
from torch.nn.parallel import distributed

from modernbert_train.__main__ import read_run
from modernbert_train.batch import Packed
from modernbert_train.checkpoints import saver
from modernbert_train.config import packages
from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import RunError
from modernbert_train.models.attention import flash, varlen
from modernbert_train.models.attention.visible import Visible
from modernbert_train.plan.memory import memory
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.train import composer_internals, session
from modernbert_train.train.step import Loop
from modernbert_train.weights.shares import Copier
from tests.cuda_build import flash as flash_attention
from tests.cuda_build.null import Account, by_kind, faults
from tests.support.tiny_run import TINY_YAML, make_tiny_data

RANKS = {"ddp": 2, "fsdp2": 2, "hsdp": 4}
STEPS = 8
SAVED = 6  # a checkpoint is taken at its end
WATCHED = 5  # the step that is counted: after warmup, and without a checkpoint


class Watch(Callback):
    """Counts one step; collects faults of all steps."""

    def __init__(self) -> None:
        self.account, self.peak = Account(), 0
        self.step: dict[str, tuple[int, int]] = {}
        self.after_checkpoint: dict[str, tuple[int, int]] = {}
        self.predicted = 0
        self.faults: set[str] = set()

    def batch_end(self, state: Any, logger: Any) -> None:
        step = state.timestamp.batch.value
        found = self.account.read()
        self.faults.update(faults(found))
        if step == SAVED + 1:
            self.after_checkpoint = found
        if step == WATCHED:
            self.step = found
            self.peak = torch.cuda.max_memory_allocated()
        self.account.reset()
        if step == WATCHED - 1:
            torch.cuda.reset_peak_memory_stats()

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.predicted = len(state.batch.microbatches[0].targets["positions_M"])
        for name, parameter in state.model.named_parameters():
            grad = parameter.grad
            assert grad is None or (grad.device.type == "cuda" and grad.dtype == torch.float32), name


def train(here: Path, case: str) -> dict[str, Any]:
    """Train one case, `KERNEL eager|compiled|fused alone|ddp|fsdp2|hsdp [PLANTED]`; return its counts."""
    kernel, form, strategy, *planted = case.split(maxsplit=3)
    ranks = RANKS.get(strategy, 1)
    rows = max(8, 4 * ranks)  # two microbatches for each of several ranks
    name = case.replace(" ", "-")
    shutil.rmtree(here / "runs" / name, ignore_errors=True)
    file = here / f"{name}.yaml"
    file.write_text(TINY_YAML.format(runs=here / "runs", data=here / "data"), encoding="utf-8")
    words = [
        *(str(file), f"name={name}", "compute.device=cuda", "compute.precision=bf16"),
        f"compute.attention={kernel.rstrip('234')}",
        *(f"compute.compile={form == 'compiled'}".lower(), "data.validation=null", "data.num_workers=1"),
        *([] if strategy == "alone" else [f"distributed.strategy={strategy}"]),
        *(["distributed.shard_ranks=2"] if strategy == "hsdp" else []),
        *("phases.long=null", "phases.short.batch_warmup=null", f"phases.short.batch_rows={rows}"),
        f"phases.short.tokens={round((STEPS - 0.5) * 60 * rows)}",
        *("model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=192"),
        f"checkpoint.interval_steps={SAVED}",
        *("model.attention_out_dropout=0.1", f"optim.fused={form == 'fused'}".lower()),
    ]
    watch = Watch()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with ExitStack() as patches:
        patches.enter_context(patch.object(session, "build_callbacks", lambda *given: [watch]))
        patches.enter_context(patch.object(packages, "_is_there", lambda name: True))
        patches.enter_context(flash_attention.installed(kernel))
        plant(" ".join(planted), patches)
        if strategy != "alone":
            pretend(patches, ranks)
        run = read_run(words)
        gc.collect()
        gc.freeze()  # as the command does behind its imports; so the step collects once its layers are compiled
        try:
            session.train(run)
            outcome = "done"
        except (RunError, RuntimeError) as error:
            outcome = str(error)
    gc.collect()
    torch.cuda.empty_cache()
    counters = torch._dynamo.utils.counters
    return {
        "outcome": outcome,
        "step": by_kind(watch.step),
        "faults": sorted(watch.faults),
        "after_checkpoint": by_kind(watch.after_checkpoint),
        "pinned": watch.after_checkpoint.get("cudaHostRegister"),
        "copied": watch.after_checkpoint.get("copy behind device to pinned"),
        "peak": watch.peak,
        "planned": planned(run, ranks, watch.predicted),
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
    }


def planned(run: RunConfig, ranks: int, predicted: int) -> int:
    """Return the peak memory predicted by `plan`."""
    (phase,) = run.phases.values()
    strategy = run.distributed.strategy
    shards = {"ddp": 1, "fsdp2": ranks, "hsdp": run.distributed.shard_ranks or ranks}[strategy]
    told = memory(
        run.modernbert,
        run.compute,
        count_parameters(run.model, run.objective, shards=shards),
        optim=run.optim,
        bf16=True,
        strategy=strategy,
        shards=shards,
        ranks=ranks,
        tokens=phase.tokens_at_once,
        predicted=predicted,
    )
    return told.peak


def plant(planted: str, patches: ExitStack) -> None:
    """Plant a mistake that the device must notice."""
    if planted == "no wait for the copies":
        patches.enter_context(patch.object(Copier, "wait", lambda self: None))
    elif planted == "no wait of the device":
        patches.enter_context(patch.object(Copier, "before_update", lambda self: None))
    elif planted == "boundaries of 64 bits":
        prepare = flash.prepare

        def of_64_bits(packed: Packed, visible: Visible) -> varlen.Layout:
            return prepare(replace(packed, cu_seqlens_S=packed.cu_seqlens_S.long()), visible)

        patches.enter_context(patch.object(flash, "prepare", of_64_bits))
    elif planted == "a wait more":
        advance = Loop.advance

        def slower(self: Any, *args: Any) -> None:
            advance(self, *args)
            float(next(self.state.model.parameters()).sum())

        patches.enter_context(patch.object(Loop, "advance", slower))


def pretend(patches: ExitStack, ranks: int) -> None:
    """Make this process rank 0 of several; the other ranks' contributions equal its own."""
    names = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0, "MASTER_PORT": 1}
    here = {each: str(value) for each, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    patches.enter_context(patch.dict(os.environ, here))

    def gather(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * ranks

    def written(self: Any, snapshot: Any) -> None:
        snapshot.copied()
        tensors = {**snapshot.share.weights, **snapshot.share.optimizer}
        damaged = [each for each, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()]
        if damaged:
            self._error = RunError(f"not finite: {damaged}")
        else:
            self._saved = saver.Saved(snapshot.step, 0, 0.0)

    for thing, each, instead in (
        (dist, "all_gather_object", gather),
        (composer_dist, "all_gather_object", lambda value: [value] * ranks),
        (distributed, "_verify_param_shape_across_processes", lambda *_, **__: None),  # it would read from the device
        (session, "joined", lambda *_: nullcontext()),
        (saver.Saver, "_run", written),
    ):
        patches.enter_context(patch.object(thing, each, instead))
    patches.enter_context(patch.dict(composer_internals.BACKENDS, cuda="nccl"))
    if not dist.is_initialized():  # never ended, since the ranks of a group wait for each other
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    if not Path(folder, "data").exists():
        make_tiny_data(Path(folder, "data"))
    found = {case: train(Path(folder), case) for case in cases}
    print(json.dumps(found), flush=True)
    os._exit(0)  # without cleanup: a group of two would wait for the other rank
