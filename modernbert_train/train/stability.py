"""Skips the update of a batch whose loss or gradient is not finite, or whose loss is a spike.

The decision falls between the backward pass and the optimizer's step, the one place in a step where the host waits
for the device. One all-reduce, of the loss, its weight and the squared gradient, tells every rank the same: NaN and
infinity survive any sum. The requests of save_requests.py travel with it. An update is skipped by dropping the
gradients, because an optimizer leaves parameters without one alone: weights, moments and step counts stay, whichever
optimizer and sharding it is.

Rolling back means: weights and moments of an earlier checkpoint, with the clock and the data where they are. So the
batches since that checkpoint are neither repeated nor kept, and nothing has to be rewound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import PackedLoader
from modernbert_train.data.planner import BatchPlan
from modernbert_train.errors import RunError
from modernbert_train.optim.stable_adamw import tensor_norms
from modernbert_train.ranks.group import on_rank_zero
from modernbert_train.ranks.save_requests import Requests
from modernbert_train.run.checkpoint import Checkpoint
from modernbert_train.run.progress import Progress
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.run.saved_state import GuardState, SkippedUpdate
from modernbert_train.run.spikes import highest_normal_loss
from modernbert_train.run.verdict import find_target, find_target_again, judge, why_stop
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.diagnosis import as_json, describe, diagnose
from modernbert_train.weights.gather import load_optimizer, load_weights


class UnstableRun(RunError):
    """The loss or a gradient is not finite, or the loss jumped, and the configuration says stop. Not to be retried."""


class Guard(Callback):
    """Looks at every batch before its update is applied, and acts as `config.stability` says.

    What was decided for a step is written to faults.jsonl before it is acted on, and a run that is killed and comes
    to that step again decides the same, even if the fault itself does not come again.

    Args:
        config: the run.
        loader: knows what the present batch is made of.
        folder: the run's folder.
        progress: shows what happens.
        reseed: puts dropout to the start of a step, given the number of steps before it.
        requests: this rank's requests, which are made known to all.

    Attributes:
        grad_norm: of the present batch, over all ranks.
        predicted: labels in the present batch, over all ranks. A batch without one is a step of loss 0, which says
            nothing of the losses before and after it: it is counted, told the first time, and not compared.
        refused: the update of the present batch was skipped.
        rolled_back: weights and moments were taken from a checkpoint, so a new one is due.
    """

    def __init__(
        self,
        config: RunConfig,
        loader: PackedLoader,
        folder: RunFolder,
        progress: Progress,
        reseed: Callable[[int], None],
        requests: Requests,
    ) -> None:
        self._config = config
        self._settings = config.stability
        self._loader = loader
        self._folder = folder
        self._progress = progress
        self._reseed = reseed
        self._requests = requests
        self._decided = {
            (entry["step"], entry["tokens_before"]): entry
            for entry in on_rank_zero(folder.read_faults)
            if entry["action"] in ("skip", "roll_back")
        }
        self._losses: list[tuple[Tensor, int]] = []  # of the step's microbatches on this rank, with their weights
        self._history: deque[float] = deque(maxlen=self._settings.spike_window_batches)
        self._phase: str | None = None  # that the history belongs to
        self._skipped_updates: list[SkippedUpdate] = []
        self._unlabelled_steps = 0
        self._target: Checkpoint | None = None
        self.grad_norm, self.predicted = math.nan, 0
        self.refused = self.rolled_back = False

    def state_dict(self) -> GuardState:
        """The losses that the next one is compared with, and every range of tokens left out so far; JSON."""
        return {
            "phase": self._phase,
            "losses": list(self._history),
            "skipped_updates": self._skipped_updates,
            "unlabelled_steps": self._unlabelled_steps,
        }

    def load_state_dict(self, state: GuardState) -> None:
        """Go on from a checkpoint's state."""
        self._load_history(state)
        self._skipped_updates = list(state["skipped_updates"])
        self._unlabelled_steps = state["unlabelled_steps"]

    def _load_history(self, state: GuardState) -> None:
        self._phase = state["phase"]
        self._history = deque(state["losses"], maxlen=self._settings.spike_window_batches)

    def batch_start(self, state: State, logger: Logger) -> None:
        self._losses = []
        self._target, self.refused, self.rolled_back = None, False, False
        plan: BatchPlan = state.batch.plan
        if plan.phase != self._phase:  # other rows, another theta: another level of the loss
            self._history.clear()
            self._phase = plan.phase

    def after_loss(self, state: State, logger: Logger) -> None:
        assert isinstance(state.loss, Tensor)
        self._losses.append((state.loss.detach(), state.batch.num_predicted))

    def after_train_batch(self, state: State, logger: Logger) -> None:
        plan: BatchPlan = state.batch.plan
        loss, grad_norm = self._measure(state.model)
        self.grad_norm = grad_norm
        state.total_loss_dict = {"loss/train/total": loss}
        step = state.timestamp.batch.value + 1
        entry = self._decided.get((step, plan.tokens_before))
        if entry is not None:
            if entry["action"] == "roll_back":
                self._target = self._find_target(entry, entry["to"]) or self._find_target(entry)
            self._refuse(state, entry)
        elif fault := judge(
            self._config,
            self._history,
            tokens_before=plan.tokens_before,
            predicted=self.predicted,
            loss=loss,
            grad_norm=grad_norm,
        ):
            entry = {
                "kind": "fault",
                "fault": fault,
                "step": step,
                "phase": plan.phase,
                "tokens_before": plan.tokens_before,
                "tokens": plan.tokens_before + plan.tokens,
                "loss": as_json(loss),
                "grad_norm": as_json(grad_norm),
                "action": getattr(self._settings, fault),
            }
            if entry["action"] == "ignore":
                self._history.append(loss)
            else:
                self._answer(state, entry)
        elif self.predicted == 0:
            self._count_unlabelled(step)
            return
        else:
            self._history.append(loss)
            return
        in_full_elsewhere = ("microbatches", "damaged_weights", "damaged_gradients", "time")
        line = {key: value for key, value in entry.items() if key not in in_full_elsewhere}
        on_rank_zero(lambda: self._folder.record(line))
        logger.log_metrics({"train/skipped_updates": len(self._skipped_updates)})

    def _measure(self, model: nn.Module) -> tuple[float, float]:
        """Mean loss over the predicted tokens of the global batch, and the norm of its gradient; equal on all ranks."""
        total = sum(loss.double() * weight for loss, weight in self._losses)
        assert isinstance(total, Tensor)
        request = self._requests.of_this_rank()
        known = (sum(weight for _, weight in self._losses), float(request.stop), float(request.overdue))
        squared = squared_gradient(model.parameters(), dist.get_world_size())
        sums = torch.stack([total, squared, *(torch.full_like(total, number) for number in known)])
        dist.all_reduce(sums)
        loss_sum, square, predicted, ranks_that_stop, ranks_overdue = sums.tolist()
        self._requests.agree(ranks_that_stop, ranks_overdue)
        self.predicted = round(predicted)
        return loss_sum / max(1.0, predicted), math.sqrt(square)

    def _count_unlabelled(self, step: int) -> None:
        self._unlabelled_steps += 1
        if self._unlabelled_steps == 1:
            self._progress.line(
                f"warning: step {step}: not one token of its batch is predicted, so its loss is 0 and its gradient "
                "zero. All such steps have predicted=0 in metrics.jsonl, and this is said once. Raise the masking "
                "rate or the batch if there are many."
            )

    def _highest_normal_loss(self) -> float:
        return highest_normal_loss(self._history, self._settings.spike_deviations, self._settings.spike_min_rise)

    def _answer(self, state: State, entry: dict[str, Any]) -> None:
        """Find out what is wrong, say and record it, and hold the update back or end the run."""
        losses = [loss.item() for loss, _ in self._losses]
        reseed = partial(self._reseed, state.timestamp.batch.value)
        entry |= diagnose(state, entry["fault"], losses, self._loader.rows, reseed)
        for chunk in (chunk for each in entry["microbatches"] for chunk in each["documents"]):
            chunk["stream"] = self._loader.stream_of(chunk["document"])
        if entry["fault"] == "spike":
            entry["highest_normal_loss"] = self._highest_normal_loss()
        done = sum(each["action"] == entry["action"] for each in self._skipped_updates)
        reason = f"stability.{entry['fault']}={entry['action']}"
        damaged = bool(entry["damaged_weights"])
        if refusal := why_stop(self._settings, entry["action"], done=done, damaged_weights=damaged):
            reason, entry["action"] = refusal, "stop"
        elif entry["action"] == "roll_back":
            self._target = self._find_target(entry)
            if self._target is None:
                reason, entry["action"] = "there is no checkpoint of this phase to go back to", "stop"
            else:
                entry["to"] = self._target.folder.name
        on_rank_zero(partial(self._folder.record_fault, entry))
        text = f"{describe(entry)}; {reason}"
        if entry["action"] == "stop":
            raise UnstableRun(
                f"{text}. The update was not applied and the checkpoints are untouched. {self._folder.faults} has all "
                f"that is known, `inspect {self._folder.path} --batch {entry['step']}` shows the text. Fix it or the "
                "configuration, or set stability.non_finite or stability.spike to skip or roll_back, and run the same "
                "command again."
            )
        self._progress.line(f"warning: {text}; see {self._folder.faults}")
        self._refuse(state, entry)

    def _refuse(self, state: State, entry: dict[str, Any]) -> None:
        state.optimizers[0].zero_grad(set_to_none=True)
        self.refused = True
        first = entry["tokens_before"]
        if self._target is not None:
            first = self._target.state.tokens
        skipped = SkippedUpdate(
            step=entry["step"], fault=entry["fault"], action=entry["action"], tokens=(first, entry["tokens"])
        )
        self._skipped_updates = [*self._skipped_updates, skipped]

    def _find_target(self, entry: dict[str, Any], name: str | None = None) -> Checkpoint | None:
        """The checkpoint to go back to: one by name, else the newest of this phase that is old enough."""
        config, checkpoints, tokens = self._config, self._folder.checkpoints, entry["tokens_before"]
        if name is not None:
            return on_rank_zero(lambda: find_target_again(config, checkpoints, name=name, tokens_before=tokens))
        fault, step = entry["fault"], entry["step"]
        return on_rank_zero(lambda: find_target(config, checkpoints, fault=fault, step=step, tokens_before=tokens))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._target is None:
            return
        model, optimizer = inner_model(state.model), state.optimizers[0]
        there, phase = self._target.state, state.batch.plan.phase
        assert there.training is not None
        load_weights(model, self._target.weights())
        optimizer.state.clear()
        if there.phase == phase or not self._config.phases[phase].reset_moments:  # else it closed the phase before
            load_optimizer(model, optimizer, self._target.optimizer())
        self._load_history(there.training.stability)
        self.rolled_back = True


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
