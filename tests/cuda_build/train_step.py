"""`train` on the null device: python -m tests.cuda_build.train_step FOLDER CASE ..., see `train`.

The whole program, from the configuration to the last checkpoint; under ddp and fsdp2 as rank 0 of two, through torch's
NCCL and that of the null device. Prints what a step asked of the device, as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from composer import Callback
from composer.utils import dist as composer_dist
from torch.nn.parallel import distributed

from modernbert_train.__main__ import read_run
from modernbert_train.errors import RunError
from modernbert_train.run import saver
from modernbert_train.train import build, session
from modernbert_train.weights.shares import Copier
from tests.conftest import TINY_YAML, make_tiny_data
from tests.cuda_build.null import Account, by_kind, faults

RANKS = 2
STEPS = 8
SAVED = 6  # a checkpoint is taken at its end
WATCHED = 5  # the step that is counted: nothing is warming up, and no checkpoint is taken


class Watch(Callback):
    """Counts one step; and of all steps the faults."""

    def __init__(self) -> None:
        self.account, self.peak = Account(), 0
        self.step: dict[str, tuple[int, int]] = {}
        self.faults: set[str] = set()
        self.waits_of_device = 0

    def batch_end(self, state: Any, logger: Any) -> None:
        step = state.timestamp.batch.value
        found = self.account.read()
        self.faults.update(faults(found))
        if step == SAVED + 1:
            self.waits_of_device = found.get("stream waits for event", (0, 0))[0]
        if step == WATCHED:
            self.step = found
            self.peak = torch.cuda.max_memory_allocated()
        self.account.reset()
        if step == WATCHED - 1:
            torch.cuda.reset_peak_memory_stats()

    def after_train_batch(self, state: Any, logger: Any) -> None:
        for name, parameter in state.model.named_parameters():
            grad = parameter.grad
            assert grad is None or (grad.device.type == "cuda" and grad.dtype == torch.float32), name


def train(here: Path, case: str) -> dict[str, Any]:
    """Train one case, `KERNEL eager|compiled|fused alone|ddp|fsdp2 [PLANTED]`; what came of it."""
    kernel, form, strategy, *planted = case.split(maxsplit=3)
    name = case.replace(" ", "-")
    shutil.rmtree(here / "runs" / name, ignore_errors=True)
    file = here / f"{name}.yaml"
    file.write_text(TINY_YAML.format(runs=here / "runs", data=here / "data"), encoding="utf-8")
    words = [
        *(str(file), f"name={name}", "compute.device=cuda", "compute.precision=bf16", f"compute.attention={kernel}"),
        *(f"compute.compile={form == 'compiled'}".lower(), "data.validation=null", "data.num_workers=1"),
        *([] if strategy == "alone" else [f"distributed.strategy={strategy}"]),
        *("phases.long=null", "phases.short.batch_warmup=null", f"phases.short.tokens={round((STEPS - 0.5) * 480)}"),
        *("model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=192"),
        f"checkpoint.interval_steps={SAVED}",
        *("model.attention_out_dropout=0.1", *(["optim.fused=true"] if form == "fused" else [])),
    ]
    watch = Watch()
    accumulation = build.accumulation
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with ExitStack() as patches:
        patches.enter_context(patch.object(build, "accumulation", lambda *given: [*accumulation(*given), watch]))
        plant(" ".join(planted), patches)
        if strategy != "alone":
            pretend(patches)
        try:
            session.train(read_run(words))
            outcome = "done"
        except RunError as error:
            outcome = str(error)
    gc.collect()
    torch.cuda.empty_cache()
    counters = torch._dynamo.utils.counters
    return {
        "outcome": outcome,
        "step": by_kind(watch.step),
        "faults": sorted(watch.faults),
        "waits_of_device_after_checkpoint": watch.waits_of_device,
        "peak": watch.peak,
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
    }


def plant(planted: str, patches: ExitStack) -> None:
    """A mistake that the device must notice."""
    if planted == "no wait for the copies":
        patches.enter_context(patch.object(Copier, "wait", lambda self: None))
    elif planted == "no wait of the device":
        patches.enter_context(patch.object(Copier, "before_update", lambda self: None))
    elif planted == "a wait more":
        step = build.PlannedTrainer._train_batch

        def slower(self: Any, *args: Any) -> None:
            step(self, *args)
            float(next(self.state.model.parameters()).sum())

        patches.enter_context(patch.object(build.PlannedTrainer, "_train_batch", slower))


def pretend(patches: ExitStack) -> None:
    """This process is rank 0 of several; what the others would say is what this one says."""
    names = {"RANK": 0, "WORLD_SIZE": RANKS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0, "MASTER_PORT": 1}
    here = {each: str(value) for each, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    patches.enter_context(patch.dict(os.environ, here))

    def gather(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * RANKS

    def written(self: Any, snapshot: Any) -> None:
        snapshot.copied()
        tensors = {**snapshot.share.weights, **snapshot.share.optimizer}
        damaged = [each for each, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()]
        if damaged:
            self._error = RunError(f"not finite: {damaged}")

    for thing, each, instead in (
        (dist, "all_gather_object", gather),
        (composer_dist, "all_gather_object", lambda value: [value] * RANKS),
        (distributed, "_verify_param_shape_across_processes", lambda *_, **__: None),  # read from the device
        (session, "joined", lambda *_: nullcontext()),
        (saver.Saver, "_run", written),
    ):
        patches.enter_context(patch.object(thing, each, instead))
    torch.cuda.set_device(0)
    if not dist.is_initialized():  # and it stays: to end a group, its ranks wait for each other
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS)


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    if not Path(folder, "data").exists():
        make_tiny_data(Path(folder, "data"))
    found = {case: train(Path(folder), case) for case in cases}
    print(json.dumps(found), flush=True)
    os._exit(0)  # not in order: a group of two would wait for the other
