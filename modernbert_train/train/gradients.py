"""Forward and backward passes of a step's microbatches: gradients of the means over the global batch.

A microbatch gives sums. Each is divided by its count in the global batch before it goes backward, so a step's gradient
does not depend on how its batch was cut into microbatches and ranks. Plain torch: `train`, measure_speed.py and the
benchmarks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from modernbert_train.batch import Batch, Sums, weighted
from modernbert_train.core.keyed_random import derive
from modernbert_train.data.loader import StepBatch
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, sum_over_ranks, this_rank
from modernbert_train.models.casts import cast_once

_DROPOUT = 4  # of all that is drawn from the run's seed


class MicrobatchSums(NamedTuple):
    """Attributes: of each loss term the sum of a microbatch, on the device and without a graph; and its count."""

    sums: Mapping[str, Tensor]
    counts: Mapping[str, int]


def key_dropout(seed: int, step: int, number: int, device: torch.device) -> None:
    """Seed what dropout draws from with the place of a microbatch in the run.

    Microbatches of a step are given to the ranks in turn, so one has the same dropout on any number of ranks. Nothing
    is carried along: a resumed run needs no saved generator.

    Args:
        seed: of the run.
        step: optimizer steps before this one.
        number: of this rank's microbatch in the step, from 0.
        device: of this rank. `torch.manual_seed` would seed every kind of device that there might be, in a millisecond.
    """
    key = derive(derive(seed, _DROPOUT, step), number * num_ranks() + this_rank()) >> 1
    on_gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if on_gpu else torch.default_generator
    generator.manual_seed(key)


def count_terms(microbatches: Sequence[Batch], terms: Mapping[str, float]) -> dict[str, int]:
    """Count of each loss term in a rank's part of the global batch."""
    return {term: sum(part.counts[term] for part in microbatches) for term in terms}


def counts_per_rank(counts: Mapping[str, int], device: torch.device) -> dict[str, float | Tensor]:
    """Counts of the global batch over the number of ranks, which DDP and FSDP2 divide gradients by.

    Of several ranks they are fp64 and stay on the device. Where there is nothing on any rank, the sum is 0 and so are
    its gradients, whatever they are divided by.
    """
    if num_ranks() == 1:
        return {term: float(max(1, count)) for term, count in counts.items()}
    totals = torch.tensor([*counts.values()], dtype=torch.float64).to(device, non_blocking=True)  # else the host waits
    sum_over_ranks(totals)
    return dict(zip(counts, (totals.clamp(min=1) / num_ranks()).unbind(), strict=True))


def gradients(
    model: nn.Module,
    batch: StepBatch,
    compute: Compute,
    seed: int,
    step: int,
    at: Callable[[str, Batch, Any, bool], None] = lambda *_: None,
) -> list[MicrobatchSums]:
    """Forward and backward of a rank's microbatches, into the gradients of the model's parameters.

    Args:
        model: as it is called: in DDP, sharded in place, or plain.
        batch: this rank's share of the global batch.
        compute: device and precision.
        seed: of the run, for dropout.
        step: optimizer steps before this one, for dropout.
        at: called at each of Composer's events of a microbatch: with the event's name, the microbatch on its device,
            the sums after the forward pass or the loss after it was computed, and whether it is the step's last.

    Returns:
        The sums of each microbatch.
    """
    objective, parts, found = batch.plan.objective, batch.microbatches, []
    terms = objective.terms
    divisors = counts_per_rank(count_terms(parts, terms), compute.device)

    def forward(number: int, microbatch: Batch) -> Sums:
        key_dropout(seed, step, number, compute.device)
        with compute.autocast():
            sums: Sums = model(microbatch)
        return sums

    with cast_once(model, torch.bfloat16 if compute.bf16 else None):
        known: list[Mapping[str, Tensor]] = [{}] * len(parts)
        if objective.compares:
            from modernbert_train.train.first_pass import first_pass

            known = first_pass(forward, parts, objective, compute.device)
        for number, part in enumerate(parts):
            microbatch = part.to(compute.device, non_blocking=True).with_targets(known[number])
            last = number + 1 == len(parts)
            with synchronized(model, last=last):
                at("before_forward", microbatch, None, last)
                sums = forward(number, microbatch)
                at("after_forward", microbatch, sums, last)
                at("before_loss", microbatch, None, last)
                loss = weighted(sums.losses, terms, divisors)
                at("after_loss", microbatch, loss, last)
                at("before_backward", microbatch, None, last)
                loss.backward()
                at("after_backward", microbatch, None, last)
            found.append(MicrobatchSums({term: sums.losses[term].detach() for term in terms}, part.counts))
    return found


@contextmanager
def synchronized(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Sum gradients over the ranks where that costs no memory: with a step's last microbatch alone.

    Under FSDP2 each microbatch must reduce-scatter, or whole gradients would pile up; under HSDP the sum over copies
    of the shards can wait for the last one, since only a shard waits.

    Args:
        model: as it is called.
        last: whether this is the step's last microbatch.
    """
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if last else model.no_sync():
            yield
        return
    # what was sharded as a whole is the model or stands in Composer's wrapper; its setting reaches all below it
    root = next((module for module in (model, *model.children()) if isinstance(module, FSDPModule)), None)
    if root is not None:
        root.set_requires_all_reduce(last)
    yield
