"""The GPUs that a run computes on: what torch says of each rank's, and what holds for all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from modernbert_train.config.packages import missing_on_gpu
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import gather_from_all, ranks_per_node
from modernbert_train.plan.room import Card

OLDEST = (8, 0)  # capability, of compiled layers and fused kernels: the first with bf16


def card_of_all(compute: Compute) -> Card | None:
    """What holds for the GPUs of all ranks, None on CPUs; every rank calls it and has the same answer."""
    gpu = str(torch.cuda.get_device_properties(compute.device).uuid) if compute.device.type == "cuda" else ""
    found = gather_from_all((gpu, card_of(compute)))
    ranks_of = Counter(gpu for gpu, _ in found)  # several, where ranks share a GPU
    cards = [replace(card, memory_bytes=card.memory_bytes // ranks_of[gpu]) for gpu, card in found if card is not None]
    return Card.of_all(cards) if cards else None


def card_of(compute: Compute) -> Card | None:
    """The GPU of this rank; None on a CPU."""
    if compute.device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(compute.device)
    lacks = missing_on_gpu()
    if (gpu.major, gpu.minor) < OLDEST:
        lacks.insert(0, f"{gpu.name} has capability {gpu.major}.{gpu.minor}, and 8.0 is needed")
    return Card(gpu.name, gpu.total_memory, ranks_per_node(), compute.bf16, tuple(lacks))
