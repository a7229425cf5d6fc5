"""Sums of a step over all ranks, once its gradients are computed.

They are summed between the backward pass and the optimizer's step, the only place in a step where the host waits for
the device. One all-reduce gives every rank the same numbers: NaN and infinity survive any sum. It also sums the ranks'
requests to save or stop (save_requests.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modernbert_train.distributed.group import num_ranks, sums_over_ranks
from modernbert_train.distributed.save_requests import Requests, SaveRequest
from modernbert_train.optim.stable_adamw import tensor_norms
from modernbert_train.train.gradients import MicrobatchSums
from modernbert_train.train.silent_faults import SilentFaults


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of the global batch, equal on all ranks.

    Attributes:
        losses: mean of each loss term over its count; in nats for predicted tokens.
        counts: count of each loss term. A batch with none has loss 0 and says nothing about the losses around it.
        loss: weighted sum of the terms' losses.
        grad_norm: L2 norm of the gradient of `loss`.
        requests: of all ranks, joined.
    """

    losses: Mapping[str, float]
    counts: Mapping[str, int]
    loss: float
    grad_norm: float
    requests: SaveRequest

    @classmethod
    def of(
        cls,
        terms: Mapping[str, float],
        sums: Sequence[float],
        counts: Sequence[float],
        squared_gradient: float,
        ranks_that_stop: float,
        ranks_overdue: float,
        ranks_failed: float = 0.0,
    ) -> StepNumbers:
        """Compute the numbers from sums over ranks, in the order of the terms; a request of one rank is enough."""
        losses = {term: each / max(1.0, count) for term, each, count in zip(terms, sums, counts, strict=True)}
        return cls(
            losses=losses,
            counts={term: round(count) for term, count in zip(terms, counts, strict=True)},
            loss=sum(weight * losses[term] for term, weight in terms.items()),
            grad_norm=math.sqrt(squared_gradient),
            requests=SaveRequest(stop=ranks_that_stop > 0, overdue=ranks_overdue > 0, failed=ranks_failed > 0),
        )

    @property
    def predicted(self) -> int:
        """Count of the first term: predicted tokens, for an objective that predicts tokens."""
        return next(iter(self.counts.values()))


def sum_numbers(
    model: nn.Module,
    terms: Mapping[str, float],
    microbatches: Sequence[MicrobatchSums],
    requests: Requests,
    silent: SilentFaults | None,
    step: int,
) -> StepNumbers:
    """Sum the numbers of a step over all ranks, after its backward pass; the host waits for the device.

    Args:
        model: the model with its gradients.
        terms: loss term -> weight.
        microbatches: this rank's microbatches.
        requests: this rank's requests, to be shared with all.
        silent: checks for slow ranks and differing replicas; None if the parallelism does not allow it.
        step: number of the step, from 1.

    Raises:
        RunError: on every rank, if replicas of the weights differ.
    """
    loss_sums = [torch.stack([each.sums[term].double() for each in microbatches]).sum() for term in terms]
    request = requests.of_this_rank()
    counts = [sum(each.counts[term] for each in microbatches) for term in terms]
    host_values = [*counts, float(request.stop), float(request.overdue), float(request.failed)]
    squared = squared_gradient(model.parameters(), num_ranks())
    checks, seconds = ([], []) if silent is None else silent.to_sum(model.parameters(), step)
    device = [*loss_sums, squared, *checks]
    sums, split = sums_over_ranks(device, [*host_values, *seconds]), len(terms)
    host_sums = sums[len(device) : len(device) + len(host_values)]
    numbers = StepNumbers.of(terms, sums[:split], host_sums[:split], sums[split], *host_sums[split:])
    if silent is not None:
        silent.check_sums(sums[split + 1 : len(device)], sums[len(device) + len(host_values) :], step)
    return numbers


def microbatch_losses(terms: Mapping[str, float], microbatches: Sequence[MicrobatchSums]) -> list[float]:
    """Return the mean loss of each microbatch. Waits for the device, so only a faulty step calls it."""
    return [
        sum(weight * float(each.sums[term]) / max(1, each.counts[term]) for term, weight in terms.items())
        for each in microbatches
    ]


@torch.no_grad()
def squared_gradient(parameters: Iterable[nn.Parameter], num_ranks: int) -> Tensor:
    """Return this rank's share of the squared gradient norm, fp64 on the device; the sum over ranks is the whole.

    A gradient that several ranks hold is divided among them, so a replica that went bad on one rank is seen as well.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            shards = math.prod(mesh.size(dim) for dim, p in enumerate(grad.placements) if not p.is_replicate())
            by_copies.setdefault(num_ranks // shards, []).append(grad.to_local())
        elif grad is not None:
            by_copies.setdefault(num_ranks, []).append(grad)
    squares = [torch.stack(tensor_norms(grads)).square().sum() / copies for copies, grads in by_copies.items()]
    return torch.stack(squares).sum()


def as_json(value: float) -> float | str:
    """Return a number; "nan", "inf" or "-inf" where JSON has none."""
    return value if math.isfinite(value) else str(value)
