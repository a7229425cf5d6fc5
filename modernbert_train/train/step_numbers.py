"""What every rank knows of a step once its gradients are there, and what became of its update.

The numbers are taken between the backward pass and the optimizer's step, the one place in a step where the host waits
for the device. One all-reduce tells every rank the same: NaN and infinity survive any sum. The requests of
save_requests.py travel with it. The guard, the recorder and the saver read them here and do not know each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modernbert_train.optim.stable_adamw import tensor_norms
from modernbert_train.ranks.save_requests import Requests, SaveRequest


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of the global batch, equal on all ranks.

    Attributes:
        loss: mean over the predicted tokens, in nats.
        grad_norm: L2 norm of its gradient.
        predicted: labels in it. A batch without one is a step of loss 0, which says nothing of the losses before and
            after it.
        asked: what any rank asks for.
    """

    loss: float
    grad_norm: float
    predicted: int
    asked: SaveRequest

    @classmethod
    def of(
        cls, loss_sum: float, squared_gradient: float, predicted: float, ranks_that_stop: float, ranks_overdue: float
    ) -> StepNumbers:
        """Out of sums over the ranks. One rank that asks is enough."""
        return cls(
            loss=loss_sum / max(1.0, predicted),
            grad_norm=math.sqrt(squared_gradient),
            predicted=round(predicted),
            asked=SaveRequest(stop=ranks_that_stop > 0, overdue=ranks_overdue > 0),
        )

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class CurrentStep(Callback):
    """Takes the numbers of a step, for the callbacks after it.

    Args:
        requests: this rank's requests, which are made known to all.

    Attributes:
        skipped: its update is not applied; set by the guard.
        rolled_back: weights and moments were taken from a checkpoint, so a new one is due; set by the guard.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._losses: list[tuple[Tensor, int]] = []  # of the microbatches on this rank, with their weights
        self._numbers: StepNumbers | None = None
        self.skipped = self.rolled_back = False

    @property
    def numbers(self) -> StepNumbers:
        """Of the present step, once it has gone backward."""
        assert self._numbers is not None
        return self._numbers

    def microbatch_losses(self) -> list[float]:
        """Mean loss of each microbatch on this rank. Waits for the device: for a step in which something is wrong."""
        return [loss.item() for loss, _ in self._losses]

    def batch_start(self, state: State, logger: Logger) -> None:
        self._losses, self._numbers = [], None
        self.skipped = self.rolled_back = False

    def after_loss(self, state: State, logger: Logger) -> None:
        assert isinstance(state.loss, Tensor)
        self._losses.append((state.loss.detach(), state.batch.num_predicted))

    def after_train_batch(self, state: State, logger: Logger) -> None:
        total = sum(loss.double() * weight for loss, weight in self._losses)
        assert isinstance(total, Tensor)
        request = self._requests.of_this_rank()
        known = (sum(weight for _, weight in self._losses), float(request.stop), float(request.overdue))
        squared = squared_gradient(state.model.parameters(), dist.get_world_size())
        sums = torch.stack([total, squared, *(torch.full_like(total, number) for number in known)])
        dist.all_reduce(sums)
        self._numbers = StepNumbers.of(*sums.tolist())
        state.total_loss_dict = {"loss/train/total": self._numbers.loss}


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
