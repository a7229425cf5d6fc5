"""Write each step's line in metrics.jsonl: batch, loss and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from modernbert_train.data.loader import StepBatch
from modernbert_train.distributed.group import num_ranks
from modernbert_train.errors import StorageError
from modernbert_train.report.progress import Progress
from modernbert_train.report.record import Reading, Record
from modernbert_train.report.throughput import Meter
from modernbert_train.train.gradients import count_terms
from modernbert_train.train.step_numbers import StepNumbers


class Times:
    """The time when a batch was requested, and the wait for it."""

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self.waited = 0.0

    def arrived(self) -> None:
        self.waited = time.perf_counter() - self._asked

    def seconds(self) -> float:
        """Return the seconds since the batch was requested."""
        return time.perf_counter() - self._asked


class Recorder:
    """Records steps without waiting for the update.

    The host has the loss and the gradient norm before the update. The line of a step is written once the norm of its
    update is available, which on a GPU is during the next step.

    Args:
        meter: measures this rank's speed.
        total_tokens: length of the run, in tokens.
        timeout_seconds: distributed.timeout_seconds.
        record: writes lines in order.
        progress: shows warnings.
        log: sends numbers to the loggers.
    """

    def __init__(
        self,
        meter: Meter,
        total_tokens: int,
        timeout_seconds: float,
        record: Record,
        progress: Progress,
        log: Callable[[dict[str, Any]], None],
    ) -> None:
        self._record = record
        self._progress = progress
        self._log = log
        self._meter, self._total, self._timeout = meter, total_tokens, timeout_seconds
        self._steps, self._warned = 0, False

    def step(
        self, batch: StepBatch, numbers: StepNumbers, number: int, tokens: int, optimizer: Optimizer, times: Times
    ) -> None:
        """Record a step whose update was applied.

        Args:
            batch: this rank's share.
            numbers: sums over all ranks.
            number: number of the step, from 1.
            tokens: global tokens after the step.
            optimizer: its learning rate is recorded, and the norm of its update if it reports one.
            times: request and arrival of the batch.
        """
        plan, seconds = batch.plan, times.seconds()
        self.warn_of_long_step(seconds)
        update_norm: Tensor | None = getattr(optimizer, "last_update_norm", None)
        counts = count_terms(batch.microbatches, plan.objective.terms)
        texts = None
        if plan.objective.compares:
            from modernbert_train.models.contrastive import text_lengths

            texts = [length for part in batch.microbatches for length in text_lengths(part).tolist()] or None
        entry: dict[str, Any] = {
            "kind": "step",
            "step": number,
            "phase": plan.phase,
            "tokens": tokens,
            "rows": plan.num_rows,
            "row_tokens": plan.row_tokens,
            "predicted": numbers.predicted,
            "loss": numbers.loss,
            **_terms(numbers),
            "lr": optimizer.param_groups[0]["lr"],
            "grad_norm": numbers.grad_norm,
            "update_norm": None,
            **self._meter.measure(plan, batch.rows, counts, seconds, times.waited, texts),
        }
        self._record.step(entry, None if update_norm is None else Reading(update_norm), self._log)
        if plan.unused:
            self._record.flush()
            ended = "phase" if tokens < self._total else "run"
            self._progress.line(
                f"the {ended} ends here; {plan.unused:,} tokens of text were waiting for a row and are not trained on"
            )

    def flush(self) -> None:
        """Write the line of the last step if it is still pending."""
        self._record.flush()

    def close(self) -> None:
        """Write a pending line and close the progress display; called however the run ends."""
        with suppress(StorageError):
            self._record.flush()
        self._progress.close()

    def warn_of_long_step(self, seconds: float) -> None:
        """Warn once if the timeout is hardly longer than a step; the first step, which may compile, is exempt."""
        self._steps += 1
        if self._steps == 1 or self._warned or num_ranks() == 1 or 2 * seconds < self._timeout:
            return
        self._warned = True
        self._progress.line(
            f"warning: distributed.timeout_seconds={self._timeout:g}, and a step has taken {seconds:.1f} s: a step "
            f"that takes longer than the timeout ends the run as a hang. Set it to {60 * math.ceil(seconds / 3):g}."
        )


def _terms(numbers: StepNumbers) -> dict[str, float]:
    """Return loss and count of each term, for an objective with several terms."""
    if len(numbers.losses) == 1:
        return {}
    losses = {f"loss/{term}": loss for term, loss in numbers.losses.items()}
    return losses | {f"count/{term}": count for term, count in numbers.counts.items()}
