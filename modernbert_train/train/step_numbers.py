"""Numbers of a step that every rank has once its gradients are there, and what became of its update.

The numbers are taken between the backward pass and the optimizer's step, the one place in a step where the host waits
for the device. One all-reduce tells every rank the same: NaN and infinity survive any sum. The requests of
save_requests.py travel with it. The guard, the recorder and the saver read them here and do not know each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modernbert_train.optim.stable_adamw import tensor_norms
from modernbert_train.ranks.group import sums_over_ranks
from modernbert_train.ranks.save_requests import Requests, SaveRequest
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
        asked: what any rank asks for.
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


class CurrentStep(Callback):
    """Takes the numbers of a step, for the callbacks after it.

    Args:
        requests: this rank's requests, which are made known to all.
        silent: finds slow ranks and copies of the weights that have parted; None where that cannot be told.

    Attributes:
        skipped: its update is not applied; set by the guard.
        rolled_back: weights and moments were taken from a checkpoint, so a new one is due; set by the guard.
    """

    def __init__(self, requests: Requests, silent: SilentFaults | None = None) -> None:
        self._requests = requests
        self._silent = silent
        self._microbatches = 0  # of this rank, in the present step
        self._terms: Mapping[str, float] = {}  # of the present step
        self._sums: list[tuple[dict[str, Tensor], Mapping[str, int]]] = []  # of this rank's microbatches, their counts
        self._numbers: StepNumbers | None = None
        self.skipped = self.rolled_back = False

    @property
    def numbers(self) -> StepNumbers:
        """Of the present step, once it has gone backward."""
        assert self._numbers is not None
        return self._numbers

    def microbatch_losses(self) -> list[float]:
        """Mean loss of each microbatch on this rank. Waits for the device: for a step in which something is wrong."""
        return [
            sum(w * float(sums[term]) / max(1, counts[term]) for term, w in self._terms.items())
            for sums, counts in self._sums
        ]

    def batch_start(self, state: State, logger: Logger) -> None:
        self._sums, self._numbers = [], None
        self._microbatches = len(state.batch.microbatches)
        self._terms = state.batch.plan.objective.terms
        self.skipped = self.rolled_back = False

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._silent is not None and not self._sums:
            self._silent.first_forward()

    def after_loss(self, state: State, logger: Logger) -> None:
        if self._silent is not None and len(self._sums) + 1 == self._microbatches:
            self._silent.last_loss()
        losses: Mapping[str, Tensor] = state.outputs.losses
        self._sums.append(({term: losses[term].detach() for term in self._terms}, state.batch.counts))

    def after_train_batch(self, state: State, logger: Logger) -> None:
        found = [torch.stack([sums[term].double() for sums, _ in self._sums]).sum() for term in self._terms]
        request = self._requests.of_this_rank()
        counts = [sum(each[term] for _, each in self._sums) for term in self._terms]
        known = [*counts, float(request.stop), float(request.overdue), float(request.failed)]
        squared = squared_gradient(state.model.parameters(), dist.get_world_size())
        number = state.timestamp.batch.value + 1
        checks, seconds = ([], []) if self._silent is None else self._silent.to_sum(state.model.parameters(), number)
        device = [*found, squared, *checks]
        sums, split = sums_over_ranks(device, [*known, *seconds]), len(self._terms)
        told = sums[len(device) : len(device) + len(known)]
        self._numbers = StepNumbers.of(self._terms, sums[:split], told[:split], sums[split], *told[split:])
        state.total_loss_dict = {"loss/train/total": self._numbers.loss}
        if self._silent is not None:
            self._silent.heard(sums[split + 1 : len(device)], sums[len(device) + len(known) :], number)


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
