"""The line of each step in metrics.jsonl: its batch, its loss and its time."""

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
    """The time of the request for a batch, and the wait for it."""

    def __init__(self) -> None:
        self._asked = time.perf_counter()
        self.waited = 0.0

    def came(self) -> None:
        self.waited = time.perf_counter() - self._asked

    def seconds(self) -> float:
        """Since it was asked for."""
        return time.perf_counter() - self._asked


class Recorder:
    """Records steps.

    The host has been told the loss and the gradient's norm before the update, and nothing here waits for the update:
    the line of a step is written when the norm of its update is there, which on a GPU is while the next step is
    computed.

    Args:
        meter: of this rank.
        total_tokens: of the run.
        timeout_seconds: distributed.timeout_seconds.
        record: writes lines in their order.
        progress: shows warnings.
        log: gives numbers to the loggers.
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
            numbers: of all ranks.
            number: of the step, from 1.
            tokens: global tokens seen after it.
            optimizer: has the rate, and the norm of the update if it tells it.
            times: of its batch.
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
            what = "phase" if tokens < self._total else "run"
            self._progress.line(
                f"the {what} ends here; {plan.unused:,} tokens of text were waiting for a row and are not trained on"
            )

    def flush(self) -> None:
        """Write the line of the last step, if that had to wait."""
        self._record.flush()

    def close(self) -> None:
        """Every end of a run calls this; the last checkpoint has flushed the last line, or an error is under way."""
        with suppress(StorageError):
            self._record.flush()
        self._progress.close()

    def warn_of_long_step(self, seconds: float) -> None:
        """Warn once, if the ranks wait for each other hardly longer than a step takes; the first one compiles, too."""
        self._steps += 1
        if self._steps == 1 or self._warned or num_ranks() == 1 or 2 * seconds < self._timeout:
            return
        self._warned = True
        self._progress.line(
            f"warning: distributed.timeout_seconds={self._timeout:g}, and a step has taken {seconds:.1f} s: one "
            f"that takes longer counts as a hang, and ends the run. Set it to {60 * math.ceil(seconds / 3):g}."
        )


def _terms(numbers: StepNumbers) -> dict[str, float]:
    """Of an objective of several terms, the loss and the count of each."""
    if len(numbers.losses) == 1:
        return {}
    losses = {f"loss/{term}": loss for term, loss in numbers.losses.items()}
    return losses | {f"count/{term}": count for term, count in numbers.counts.items()}
