"""Forward and backward passes of a step's microbatches: gradients of the means over the global batch.

A microbatch returns sums. Each is divided by its count in the global batch before the backward pass, so the gradient of
a step does not depend on how its batch is cut into microbatches and ranks. Plain torch, without Composer: `train`,
measure_speed.py and the benchmarks share it.
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

_DROPOUT = 4  # stream id of dropout keys; other users of the seed have other ids


class MicrobatchSums(NamedTuple):
    """Loss sums of one microbatch, by loss term.

    Attributes:
        sums: on the device, without a graph.
        counts: number of items in each sum.
    """

    sums: Mapping[str, Tensor]
    counts: Mapping[str, int]


def key_dropout(seed: int, step: int, number: int, device: torch.device) -> None:
    """Seed dropout by the position of a microbatch in the run.

    Microbatches of a step are dealt to the ranks round-robin, so each has the same dropout on any number of ranks. A
    resumed run needs the seed only, and restores no generator state.

    Args:
        seed: the run's seed.
        step: optimizer steps before this one.
        number: index of this rank's microbatch in the step, from 0.
        device: this rank's device. `torch.manual_seed` would seed every kind of device, which takes a millisecond.
    """
    key = derive(derive(seed, _DROPOUT, step), number * num_ranks() + this_rank()) >> 1
    on_gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if on_gpu else torch.default_generator
    generator.manual_seed(key)


def count_terms(microbatches: Sequence[Batch], terms: Mapping[str, float]) -> dict[str, int]:
    """Count each loss term in this rank's share of the global batch."""
    return {term: sum(each.counts[term] for each in microbatches) for term in terms}


def counts_per_rank(counts: Mapping[str, int], device: torch.device) -> dict[str, float | Tensor]:
    """Return counts of the global batch divided by the number of ranks, since DDP and FSDP2 average gradients.

    With several ranks the counts are fp64 tensors on the device. A term that no rank has is divided by 1: its sum and
    its gradient are 0.
    """
    if num_ranks() == 1:
        return {term: float(max(1, count)) for term, count in counts.items()}
    # non_blocking: a blocking copy would make the host wait for the device
    totals = torch.tensor([*counts.values()], dtype=torch.float64).to(device, non_blocking=True)
    sum_over_ranks(totals)
    return dict(zip(counts, (totals.clamp(min=1) / num_ranks()).unbind(), strict=True))


def gradients(
    model: nn.Module,
    batch: StepBatch,
    compute: Compute,
    seed: int,
    step: int,
    on_event: Callable[[str, Batch, Any, bool], None] = lambda *_: None,
) -> list[MicrobatchSums]:
    """Run forward and backward of a rank's microbatches; gradients accumulate in the model's parameters.

    Args:
        model: the model to call: wrapped in DDP, sharded in place, or plain.
        batch: this rank's share of the global batch.
        compute: device and precision.
        seed: the run's seed, for dropout.
        step: optimizer steps before this one, for dropout.
        on_event: called at each of Composer's events of a microbatch, with the event's name, the microbatch on its
            device, the sums (after the forward pass) or the loss, and True for the step's last microbatch.

    Returns:
        The sums of each microbatch.
    """
    objective, microbatches, all_sums = batch.plan.objective, batch.microbatches, []
    terms = objective.terms
    divisors = counts_per_rank(count_terms(microbatches, terms), compute.device)

    def forward(number: int, microbatch: Batch) -> Sums:
        # here, so that both passes of a comparing objective drop the same activations: the first one's gradients
        # belong to exactly the vectors that the second one computes
        key_dropout(seed, step, number, compute.device)
        with compute.autocast():
            sums: Sums = model(microbatch)
        return sums

    # bf16 copies of the weights are made once for the step: autocast would make them in each microbatch
    with cast_once(model, torch.bfloat16 if compute.bf16 else None):
        targets: list[Mapping[str, Tensor]] = [{}] * len(microbatches)
        if objective.compares:  # negatives are of the global batch: all vectors first, without a graph
            from modernbert_train.train.first_pass import first_pass

            targets = first_pass(forward, microbatches, objective, compute.device)
        for number, on_host in enumerate(microbatches):
            microbatch = on_host.to(compute.device, non_blocking=True).with_targets(targets[number])
            last = number + 1 == len(microbatches)
            with synchronized(model, last=last):  # the forward pass too: DDP decides there whether to reduce
                on_event("before_forward", microbatch, None, last)
                sums = forward(number, microbatch)
                on_event("after_forward", microbatch, sums, last)
                on_event("before_loss", microbatch, None, last)
                # divided by global counts, so all microbatches' and ranks' gradients add up to the gradient of the mean
                loss = weighted(sums.losses, terms, divisors)
                on_event("after_loss", microbatch, loss, last)
                on_event("before_backward", microbatch, None, last)
                loss.backward()
                on_event("after_backward", microbatch, None, last)
            all_sums.append(MicrobatchSums({term: sums.losses[term].detach() for term in terms}, on_host.counts))
    return all_sums


@contextmanager
def synchronized(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Synchronize gradients with the last microbatch of a step only, except where that would cost memory.

    Under FSDP2 each microbatch must reduce-scatter, or unsharded gradients would accumulate. Under HSDP the all-reduce
    over replicas of the shards waits for the last microbatch, since only a shard is kept.

    Args:
        model: the model to call.
        last: True for the step's last microbatch.
    """
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if last else model.no_sync():
            yield
        return
    # find the FSDP root: the model, or a child of Composer's wrapper; its setting applies to all modules below
    root = next((module for module in (model, *model.children()) if isinstance(module, FSDPModule)), None)
    if root is not None:
        root.set_requires_all_reduce(last)
    yield
