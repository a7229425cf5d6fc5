"""Numbers of a step that every rank has once its gradients are there.

The numbers are taken between the backward pass and the optimizer's step, the one place in a step where the host waits
for the device. One all-reduce tells every rank the same: NaN and infinity survive any sum. The requests of
save_requests.py travel with it.
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
        counts: of each loss term. A batch without any is a step of loss 0, which says nothing of the losses before
            and after it.
        loss: of both, each term with its weight.
        grad_norm: L2 norm of its gradient.
        asked: requests of all ranks.
    """

    losses: Mapping[str, float]
    counts: Mapping[str, int]
    loss: float
    grad_norm: float
    asked: SaveRequest

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
        """Out of sums over the ranks, those of the terms in their order. One rank that asks is enough."""
        losses = {term: each / max(1.0, count) for term, each, count in zip(terms, sums, counts, strict=True)}
        return cls(
            losses=losses,
            counts={term: round(count) for term, count in zip(terms, counts, strict=True)},
            loss=sum(weight * losses[term] for term, weight in terms.items()),
            grad_norm=math.sqrt(squared_gradient),
            asked=SaveRequest(stop=ranks_that_stop > 0, overdue=ranks_overdue > 0, failed=ranks_failed > 0),
        )

    @property
    def predicted(self) -> int:
        """Count of the first term: of an objective that predicts tokens, how many."""
        return next(iter(self.counts.values()))

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def sum_numbers(
    model: nn.Module,
    terms: Mapping[str, float],
    parts: Sequence[MicrobatchSums],
    requests: Requests,
    silent: SilentFaults | None,
    step: int,
) -> StepNumbers:
    """Numbers of a step that has gone backward, from all ranks; the host waits for the device.

    Args:
        model: with its gradients.
        terms: loss term -> its weight.
        parts: of this rank.
        requests: of this rank, made known to all.
        silent: finds slow ranks and copies of the weights that have parted; None where that cannot be found.
        step: its number, from 1.

    Raises:
        RunError: on every rank, if copies of the weights have parted.
    """
    found = [torch.stack([part.sums[term].double() for part in parts]).sum() for term in terms]
    request = requests.of_this_rank()
    counts = [sum(part.counts[term] for part in parts) for term in terms]
    known = [*counts, float(request.stop), float(request.overdue), float(request.failed)]
    squared = squared_gradient(model.parameters(), num_ranks())
    checks, seconds = ([], []) if silent is None else silent.to_sum(model.parameters(), step)
    device = [*found, squared, *checks]
    sums, split = sums_over_ranks(device, [*known, *seconds]), len(terms)
    told = sums[len(device) : len(device) + len(known)]
    numbers = StepNumbers.of(terms, sums[:split], told[:split], sums[split], *told[split:])
    if silent is not None:
        silent.heard(sums[split + 1 : len(device)], sums[len(device) + len(known) :], step)
    return numbers


def microbatch_losses(terms: Mapping[str, float], parts: Sequence[MicrobatchSums]) -> list[float]:
    """Mean loss of each microbatch. Waits for the device: for a step in which something is wrong."""
    return [sum(w * float(part.sums[term]) / max(1, part.counts[term]) for term, w in terms.items()) for part in parts]


@torch.no_grad()
def squared_gradient(parameters: Iterable[nn.Parameter], num_ranks: int) -> Tensor:
    """This rank's share of the squared gradient norm: summed over ranks it is the whole, fp64, never read here.

    A gradient that several ranks hold is divided among them, so a copy that went bad on one rank is seen as well.
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
