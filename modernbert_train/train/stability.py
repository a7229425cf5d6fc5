"""Skip the update of a batch whose loss or gradient is not finite, or whose loss is a spike.

The decision falls between the backward pass and the optimizer's step, from numbers that are equal on all ranks; see
step_numbers.py. To skip an update, the gradients are dropped: optimizers leave parameters without a gradient unchanged,
so weights, moments and step counts stay, with any optimizer and sharding.

Rolling back restores the weights and moments of an earlier checkpoint, but not the clock or the data position. So the
batches since that checkpoint are not repeated, their updates are lost, and nothing has to be rewound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer

from modernbert_train.checkpoints.checkpoint import Checkpoint
from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.saved_state import GuardState, SkippedUpdate
from modernbert_train.clock import Clock
from modernbert_train.config.schema import StabilityConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.mixture import TokenStreams
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import on_rank_zero
from modernbert_train.errors import StartAgain, UnstableRun
from modernbert_train.report.progress import Progress
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.gradients import MicrobatchSums
from modernbert_train.train.step_numbers import StepNumbers, as_json, microbatch_losses
from modernbert_train.train.verdict import find_target, find_target_again, highest_normal_loss, judge, why_stop
from modernbert_train.weights.gather import load_optimizer, load_weights


@dataclass
class Verdict:
    """The decision on a step.

    Attributes:
        fault: the fault's entry in the record; None without a fault.
        skipped: True if the update is skipped.
        target: checkpoint whose weights and moments are restored after the step; None: no rollback.
    """

    fault: dict[str, Any] | None = None
    skipped: bool = False
    target: Checkpoint | None = None


class Guard:
    """Checks every batch before its update is applied, and reacts as the section `stability` configures.

    The decision is written to faults.jsonl before it takes effect. A run that is killed and repeats the step decides
    the same, even if the fault itself does not recur.

    Args:
        settings: the run's section.
        clock, seed: the run's.
        compute: device and precision.
        model: as given to Composer.
        streams: names the streams of documents.
        folder: the run's folder.
        progress: shows warnings.
        settle: waits for the checkpoint that is being written, which may be the target of a rollback.

    Attributes:
        memory: the part that checkpoints save: the losses that the next one is compared with, and every range of tokens
            left out so far.
    """

    def __init__(
        self,
        settings: StabilityConfig,
        clock: Clock,
        seed: int,
        compute: Compute,
        model: ComposerObjective,
        streams: TokenStreams,
        folder: RunFolder,
        progress: Progress,
        settle: Callable[[], None],
    ) -> None:
        self._settings, self._clock, self._seed = settings, clock, seed
        self._compute, self._model = compute, model
        self._settle = settle
        self._streams = streams
        self._folder = folder
        self._progress = progress
        self.memory = GuardState(phase=None, losses=[], skipped_updates=[], unlabelled_steps=0)
        self._decided = {
            (entry["step"], entry["tokens_before"]): entry
            for entry in on_rank_zero(folder.read_faults)
            if entry["action"] in ("skip", "roll_back")
        }

    def begin(self, phase: str) -> None:
        """Begin a step of a phase."""
        if phase != self.memory["phase"]:  # another row length or RoPE base changes the level of the loss
            self.memory["phase"], self.memory["losses"] = phase, []

    def judge(self, batch: StepBatch, sums: Sequence[MicrobatchSums], numbers: StepNumbers, step: int) -> Verdict:
        """Judge a step after its backward pass; every rank calls this and gets the same verdict.

        Args:
            batch: this rank's share.
            sums: sums of its microbatches.
            numbers: sums over all ranks.
            step: number of the step, from 1.

        Raises:
            UnstableRun: the run ends here.
            StartAgain: this rank decided alone (diagnosis.LeftOthers); the next start repeats its decision.
        """
        plan = batch.plan
        entry = self._decided.get((step, plan.tokens_before))
        target = None
        if entry is not None:
            if entry["action"] == "roll_back":
                target = self._find_target(entry, entry["to"]) or self._find_target(entry)
        elif fault := judge(
            self._settings,
            self._clock.at(plan.tokens_before),
            self.memory["losses"][-self._settings.spike_window_batches :],  # longer if the window was, before a restart
            predicted=numbers.predicted,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
        ):
            entry = {
                "kind": "fault",
                "fault": fault,
                "step": step,
                "phase": plan.phase,
                "tokens_before": plan.tokens_before,
                "tokens": plan.tokens_before + plan.tokens,
                "loss": as_json(numbers.loss),
                "grad_norm": as_json(numbers.grad_norm),
                "action": getattr(self._settings, fault),
            }
            if entry["action"] == "ignore":
                self._remember(numbers.loss)
            else:
                target = self._answer(batch, sums, entry)
        elif numbers.predicted == 0:
            self._count_unlabelled(step)
            return Verdict()
        else:
            self._remember(numbers.loss)
            return Verdict()
        in_full_elsewhere = ("microbatches", "damaged_weights", "damaged_gradients", "time")
        line = {key: value for key, value in entry.items() if key not in in_full_elsewhere}
        on_rank_zero(lambda: self._folder.record(line))
        if entry["action"] == "ignore":
            return Verdict(entry)
        self._note_skipped(entry, target)
        return Verdict(entry, skipped=True, target=target)

    def _remember(self, loss: float) -> None:
        self.memory["losses"] = [*self.memory["losses"], loss][-self._settings.spike_window_batches :]

    def _count_unlabelled(self, step: int) -> None:
        self.memory["unlabelled_steps"] += 1
        if self.memory["unlabelled_steps"] == 1:
            self._progress.line(
                f"warning: step {step}: not one token of its batch is predicted, so its loss is 0 and its gradient "
                "zero. All such steps have predicted=0 in metrics.jsonl; this warning appears once. Raise the masking "
                "rate or the batch if there are many."
            )

    def _highest_normal_loss(self) -> float:
        settings = self._settings
        losses = self.memory["losses"][-settings.spike_window_batches :]  # longer if the window was, before a restart
        return highest_normal_loss(losses, settings.spike_deviations, settings.spike_min_rise)

    def _answer(self, batch: StepBatch, sums: Sequence[MicrobatchSums], entry: dict[str, Any]) -> Checkpoint | None:
        """Diagnose and record the fault; end the run, or return the checkpoint to roll back to, if any."""
        from modernbert_train.train.diagnosis import describe, diagnose, hardware_at_fault

        step, target = entry["step"], None
        losses = microbatch_losses(batch.plan.objective.terms, sums)
        if self._compute.bf16:
            entry["precision"] = "bf16"
        diagnosis, out_of_step = diagnose(
            self._model, batch, self._compute, self._seed, step - 1, entry["fault"], losses
        )
        entry |= diagnosis
        for chunk in (chunk for each in entry["microbatches"] for chunk in each["documents"]):
            chunk["stream"] = self._streams.stream_of(chunk["document"])
        if entry["fault"] == "spike":
            entry["highest_normal_loss"] = self._highest_normal_loss()
        done = sum(each["action"] == entry["action"] for each in self.memory["skipped_updates"])
        reason = f"stability.{entry['fault']}={entry['action']}"
        damaged = bool(entry["damaged_weights"])
        if refusal := why_stop(self._settings, entry["action"], done=done, damaged_weights=damaged):
            reason, entry["action"] = refusal, "stop"
        elif entry["action"] == "roll_back":
            target = self._newest_target(entry) if out_of_step else self._find_target(entry)
            if target is None:
                reason, entry["action"] = "there is no checkpoint of this phase to roll back to", "stop"
            else:
                entry["to"] = target.folder.name
        record = partial(self._folder.record_fault, entry)
        if out_of_step:  # rank 0 waits in a layer's collective and cannot join another
            record()
        else:
            on_rank_zero(record)
        text = f"{describe(entry)}; {reason}"
        if entry["action"] == "stop":
            rounding = (
                f" To see whether bf16 is the cause, start another run with start.checkpoint={self._folder.path} and "
                "compute.precision=fp32."
            )
            unstable = UnstableRun(
                f"{text}. The update was not applied and the checkpoints are untouched. {self._folder.faults} has all "
                f"details, `inspect {self._folder.path} --batch {step}` shows the text. Fix it or the "
                "configuration, or set stability.non_finite or stability.spike to skip or roll_back, and run the same "
                f"command again.{rounding if self._compute.bf16 else ''}"
            )
            unstable.at_fault = hardware_at_fault(entry["microbatches"])
            raise unstable
        if out_of_step:
            raise StartAgain(
                f"{text}. The other ranks wait in the search, so all ranks start again from the last checkpoint and "
                f"apply this at the same step; see {self._folder.faults}"
            )
        self._progress.line(f"warning: {text}; see {self._folder.faults}")
        return target

    def _note_skipped(self, entry: dict[str, Any], target: Checkpoint | None) -> None:
        first = entry["tokens_before"] if target is None else target.state.tokens
        skipped = SkippedUpdate(
            step=entry["step"], fault=entry["fault"], action=entry["action"], tokens=(first, entry["tokens"])
        )
        self.memory["skipped_updates"] = [*self.memory["skipped_updates"], skipped]

    def _find_target(self, entry: dict[str, Any], name: str | None = None) -> Checkpoint | None:
        """Return the checkpoint to roll back to: the named one, or the newest of this phase that is old enough."""
        clock, checkpoints, tokens = self._clock, self._folder.checkpoints, entry["tokens_before"]
        self._settle()
        if name is not None:
            return on_rank_zero(lambda: find_target_again(clock, checkpoints, name=name, tokens_before=tokens))
        return on_rank_zero(partial(self._newest_target, entry))

    def _newest_target(self, entry: dict[str, Any]) -> Checkpoint | None:
        """Return the newest checkpoint to roll back to, as seen by this rank."""
        return find_target(
            self._settings,
            self._clock,
            self._folder.checkpoints,
            fault=entry["fault"],
            step=entry["step"],
            tokens_before=entry["tokens_before"],
        )

    def roll_back(self, target: Checkpoint, optimizer: Optimizer, phase: str) -> None:
        """Restore weights and moments from a checkpoint; clock and data position stay.

        Args:
            target: the checkpoint.
            optimizer: its moments are replaced.
            phase: phase of the step.
        """
        model, state = self._model.model, target.state
        assert state.training is not None
        load_weights(model, target.stored_weights())
        optimizer.state.clear()
        if state.phase == phase or not self._clock.phase(phase).phase.reset_moments:  # not across a reset of moments
            load_optimizer(model, optimizer, target.stored_optimizer())
        remembered = state.training.stability
        self.memory["phase"], self.memory["losses"] = remembered["phase"], remembered["losses"]
