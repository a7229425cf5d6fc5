"""The second half of benchmarks.scaling: what real processes spend on communication, beside what the model says.

Every round, all ranks do the same microbatches one after the other: under each strategy, and wrapped the same way for
one rank, which sends nothing. Communication is the difference between the two within a round, so that a busy machine
disturbs both alike; medians over rounds are shown. It is predicted from `plan`'s list of transfers twice: with the
seconds that gloo needs for such calls, measured in the same processes (`links`), and with `plan`'s formula for a ring,
its rate fitted to the largest all-gather (`ring`).

By the clock, and in processor time of one process, which waits for nobody: on a busy machine only that is steady.

What it can show: that the calls and bytes listed are all that is sent, and that nothing of their order is missing. What
it cannot: overlap (on CPUs FSDP2 waits for each call, and DDP's thread takes the core that computes), the speed of
NVLink or a network, or more than two processes at once where there are two cores: with 4 each has half a core, so only
seconds of communication are compared there. gloo reduces everything and keeps a part where NCCL would scatter.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.batches import lay_out, mean_loss, mlm_batch
from modernbert_train.batch import Batch
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.plan.communication import Transfer, transfer_seconds, transfers
from modernbert_train.plan.gpus import Gpu
from modernbert_train.plan.memory import Strategy
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.text import markdown_table

SHARDS: dict[int, dict[Strategy, int]] = {2: {"ddp": 1, "fsdp2": 2}, 4: {"ddp": 1, "fsdp2": 4, "hsdp": 2}}
MICROBATCHES, TOKENS = 3, 64
SIZES = tuple(8**n for n in range(4, 9))  # bytes of whole tensors, 4 K to 16 M
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
Times = dict[str, list[float]]  # what was timed -> seconds of each round
CLOCKS = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}  # of everything, and of this process with all its threads


def model_of(width: int) -> ModernBertConfig:
    """Small enough that a step on a CPU is not all computation."""
    return ModernBertConfig(
        vocab_size=8192, hidden_size=width, num_layers=4, num_heads=width // 32, intermediate_size=width * 3 // 2,
        attention_out_dropout=0.0,
    )  # fmt: skip


def wrap(strategy: Strategy, shards: int, config: ModernBertConfig) -> nn.Module:
    """A model as a run would wrap it; a test counts that Composer's wrapping sends the same.

    Args:
        shards: ranks that share one copy of the weights; 0 wraps it for this rank alone.
    """
    model = ModernBertForMaskedLM(config)
    initialize(model, config, seed=17)
    mesh = mesh_of(shards)
    if strategy == "ddp":
        return DistributedDataParallel(
            model, process_group=None if shards else mesh.get_group(), gradient_as_bucket_view=True
        )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def mesh_of(shards: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if shards == ranks:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    mesh = init_device_mesh("cpu", (ranks // max(1, shards), max(1, shards)), mesh_dim_names=("replicate", "shard"))
    return mesh if shards else mesh["shard"]


def draw_batch(vocab_size: int) -> Batch:
    """Two documents, 30 % of them predicted."""
    ids = torch.randint(vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    half, predicted = TOKENS // 2, torch.arange(0, TOKENS, 3)
    return mlm_batch(lay_out(ids, [0, half, TOKENS]), predicted)


def step(model: nn.Module, batch: Batch) -> None:
    """Gradients of MICROBATCHES microbatches, which meet as train/accumulation.py lets them."""
    model.zero_grad(set_to_none=True)
    for index in range(MICROBATCHES):
        last = index + 1 == MICROBATCHES
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(last)
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
            mean_loss(model, batch).backward()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each clock from the moment when all ranks begin until all have ended."""
    dist.barrier()
    started = {name: clock() for name, clock in CLOCKS.items()}
    work()
    dist.barrier()
    return {name: clock() - started[name] for name, clock in CLOCKS.items()}


def call(kind: str, whole: Tensor, group: Any, ranks: int) -> Callable[[], Any]:
    """One collective on a whole tensor of so many numbers."""
    part = whole[: len(whole) // ranks].clone()
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }[kind]


def measure(rank: int, ranks: int, rounds: int, width: int, folder: str) -> None:
    """One rank: links and steps in turns; rank 0 writes what it timed."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # new names that torch 2.11 does not have
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
    config = model_of(width)
    batch = draw_batch(config.vocab_size)
    plain = ModernBertForMaskedLM(config)
    initialize(plain, config, seed=17)
    work: dict[str, Callable[[], Any]] = {"nothing": lambda: None, "compute": partial(step, plain, batch)}
    work["compute of one"] = work["compute" if rank == 0 else "nothing"]
    for strategy, shards in SHARDS[ranks].items():
        for name, number in ((strategy, shards), (f"{strategy} alone", 0)):
            work[name] = partial(step, wrap(strategy, number, config), batch)
    groups = {ranks: dist.group.WORLD} | ({2: mesh_of(2).get_group("shard")} if ranks == 4 else {})
    for members, group in groups.items():
        for kind in KINDS:
            for size in SIZES:
                work[f"{kind} {members} {size}"] = call(kind, torch.zeros(size // 4), group, members)
    seconds: dict[str, Times] = {clock: {name: [] for name in work} for clock in CLOCKS}
    for number in range(rounds + 1):
        for name, each in work.items():
            took = timed(each)
            for clock in CLOCKS if number else ():  # the first round allocates, and DDP arranges its buckets after it
                seconds[clock][name].append(took[clock])
    if rank == 0:
        Path(folder, f"seconds{ranks}.json").write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


def run(ranks: int, rounds: int, width: int) -> dict[str, Times]:
    """`measure` on so many processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (ranks, rounds, width, folder), nprocs=ranks)
        found: dict[str, Times] = json.loads(Path(folder, f"seconds{ranks}.json").read_text(encoding="utf-8"))
    return found


def less(one: Sequence[float], other: Sequence[float]) -> float:
    """Median of the differences, round by round."""
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


def link_seconds(seconds: Times, kind: str, members: int, size: float) -> float:
    """Of one call, between the sizes that were measured."""
    points = [less(seconds[f"{kind} {members} {at}"], seconds["nothing"]) for at in SIZES]
    if size > SIZES[-1]:
        return points[-1] * size / SIZES[-1]
    return float(np.interp(size, SIZES, points))


def fitted(seconds: Times, ranks: int) -> Gpu:
    """A machine whose rate is that of the largest all-gather."""
    size = SIZES[-1]
    rate = (ranks - 1) / ranks * size / link_seconds(seconds, "all_gather", ranks, size)
    return Gpu("here", 1.0, 1, 1.0, node_link=rate / 0.8, network_link=1.0, price=0.0)


def predicted(seconds: Times, parts: Sequence[Transfer], ranks: int) -> tuple[float, float]:
    """Communication of a step by measured calls and by the ring."""
    gpu = fitted(seconds, ranks)
    by_links = by_ring = 0.0
    for part in parts:
        times = MICROBATCHES if part.every_microbatch else 1
        by_links += times * part.calls * link_seconds(seconds, part.kind, part.inside, part.payload / part.calls)
        by_ring += times * transfer_seconds(part, gpu)
    return by_links, by_ring


@dataclass(frozen=True)
class Comparison:
    """One strategy on some processes; milliseconds, medians over rounds.

    Attributes:
        ranks, strategy: what ran.
        alone, together: the microbatches without communication, on one process while the others wait, and on all.
        step: with communication.
        sent: for each clock, communication as measured, by links and by ring.
    """

    ranks: int
    strategy: Strategy
    alone: float
    together: float
    step: float
    sent: dict[str, tuple[float, float, float]]

    def step_cells(self) -> list[str]:
        told = self.alone + self.sent["wall"][1]
        times = [f"{each:.1f}" for each in (self.alone, self.together, self.step, told)]
        fair = self.ranks <= (os.cpu_count() or 1)
        return [f"{self.ranks}", self.strategy, *times, f"{self.step / told:.2f}" if fair else "too few cores"]

    def communication_cells(self) -> list[str]:
        cells = [f"{self.ranks}", self.strategy]
        for measured, links, ring in self.sent.values():
            cells += [f"{measured:.1f}", f"{links:.1f}", f"{measured / links:.2f}", f"{measured / ring:.2f}"]
        return cells


def compare(ranks: int, seconds: dict[str, Times], config: ModernBertConfig) -> list[Comparison]:
    """What was timed on so many processes, beside what `plan` says."""
    found, wall = [], seconds["wall"]
    for strategy, shards in SHARDS[ranks].items():
        _, *parts = transfers(
            strategy, count_parameters(config), num_layers=config.num_layers, ranks=ranks, shards=shards, per_node=8
        )
        names = ("compute of one", "compute", strategy)
        alone, together, step_seconds = (1e3 * less(wall[name], wall["nothing"]) for name in names)
        sent = {}
        for clock, times in seconds.items():
            links, ring = predicted(times, parts, ranks)
            sent[clock] = (1e3 * less(times[strategy], times[f"{strategy} alone"]), 1e3 * links, 1e3 * ring)
        found.append(Comparison(ranks, strategy, alone, together, step_seconds, sent))
    return found


def print_comparison(ranks: Sequence[int], rounds: int, width: int) -> list[Comparison]:
    """Measure on each number of processes, and print the tables."""
    config = model_of(width)
    print(f"{MICROBATCHES} microbatches of {TOKENS} tokens, {count_parameters(config).total / 1e6:.1f} M parameters")
    print(f"{os.cpu_count()} cores, one thread each, medians of {rounds} rounds\n")
    found = [each for n in ranks for each in compare(n, run(n, rounds, width), config)]
    head = ["processes", "strategy"]
    times = ["compute, one at work, ms", "all at work", "step", "one at work + links", "step over that"]
    print(markdown_table([*head, *times], [each.step_cells() for each in found]))
    names = ("communication, {} ms", "by links", "over links", "over ring")
    print("\n" + markdown_table([*head, *(name.format(clock) for clock in CLOCKS for name in names)],
                           [each.communication_cells() for each in found]))  # fmt: skip
    return found
