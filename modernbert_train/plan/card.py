"""The GPUs that a run computes on: what torch says of each rank's, and what holds for all."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modernbert_train.config.auto import MICROBATCH, OPEN, open_settings, value_of
from modernbert_train.config.packages import missing_on_gpu
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed.bf16 import cpu_gain_line
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import gather_from_all, ranks_per_node
from modernbert_train.plan.memory import usable_bytes
from modernbert_train.plan.room import GB, SLOWER, Card, configured_memory, predicts

OLDEST = (8, 0)  # capability, of compiled layers and fused kernels: the first with bf16


def card_of_all(compute: Compute) -> Card | None:
    """What holds for the GPUs of all ranks, None on CPUs; every rank calls it and has the same answer."""
    found = [card for card in gather_from_all(card_of(compute)) if card is not None]
    return Card.of_all(found) if found else None


def card_of(compute: Compute) -> Card | None:
    """The GPU of this rank; None on a CPU."""
    if compute.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(compute.device)
    lacks = missing_on_gpu()
    if (gpu.major, gpu.minor) < OLDEST:
        lacks.insert(0, f"{gpu.name} has capability {gpu.major}.{gpu.minor}, and 8.0 is needed")
    return Card(gpu.name, gpu.total_memory, ranks_per_node(), compute.bf16, tuple(lacks))


def speed_lines(given: RunConfig, taken: RunConfig, card: Card | None, ranks: int) -> Iterator[str]:
    """What a run on GPUs does without, and which microbatch it took, each in a sentence; on CPUs what bf16 would win.

    Args:
        given: the run as its user gives it.
        taken: the same with nothing open.
        card: its GPUs; None on CPUs.
        ranks: of the run.
    """
    if card is None:
        if (line := cpu_gain_line(given.compute.precision)) is not None:
            yield line
        return
    left = open_settings(given)
    off = [key for key in left if key in OPEN and OPEN[key].fast is True and value_of(taken, key) is False]
    if card.lacks and off:
        yield (
            f"{' and '.join(off)} {'are' if len(off) > 1 else 'is'} off: {'; '.join(card.lacks)}. Without both a run "
            f"takes about {SLOWER} times as long"
        )
    names = [name for name in taken.phases if f"phases.{name}.{MICROBATCH}" in left]
    if names and predicts(taken):
        peak, name = max((configured_memory(taken, name, card, ranks).peak, name) for name in names)
        yield (
            f"microbatches that were left open take {peak / GB:.1f} of {usable_bytes(card) / GB:.1f} usable GB, by "
            f"`plan`, in phase {name}"
        )
    elif names:
        yield f"memory of {taken.model.name} is not predicted: set phases.{names[0]}.{MICROBATCH} as large as fits"
