"""Measure a step: model FLOP/s, their share of the GPU's peak, the wait for data, memory, and the time left.

No measurement synchronises with the device: FLOPs are counted from the document lengths of the batch, times are the
host's, and memory comes from the allocator's counters on the host. It takes 0.1 ms for 1,728 documents in 576 rows.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from modernbert_train.config.schema import ModelConfig, ObjectiveConfig
from modernbert_train.data.planner import BatchPlan, Row, StreamCount
from modernbert_train.distributed.compute import Compute
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import flops_per_token, mean_spans
from modernbert_train.plan.gpus import DEVICE_NAMES, GPUS
from modernbert_train.plan.teacher_cost import teacher_flops, teacher_of

_RECENT_STEPS = 50  # for the estimate of the time left
_SLOWEST_PARTS = 20  # leave out the slowest 1 of 20 steps, at least one: it compiled, or waited for a rare event
_SETTLED_SECONDS = 600.0  # divide time between steps (validations, checkpoints) by at least this, in a young process


def training_flops(
    rows: Sequence[Row],
    counts: Mapping[str, int],
    model: ModelConfig,
    objective: ObjectiveConfig,
    texts: Sequence[int] | None = None,
) -> float:
    """Count the FLOPs of a forward and a backward pass over some rows, by the true length of each sequence.

    A frozen encoder and a teacher count the forward pass only; compared pairs count two forward passes. Padding,
    recomputation and work outside of attention windows do not count; see plan/flops.py.

    Args:
        rows: the chunks in each row.
        counts: of each loss term in them, in the order of `objective.terms`.
        model: the encoder.
        objective: of the step.
        texts: tokens of each text, if pairs are compared; None: a chunk is one sequence.
    """
    lengths = texts or [chunk.length + objective.special_tokens for row in rows for chunk in row]
    tokens, counted = sum(lengths), census(model, objective)
    uses = {head: count / tokens for head, count in zip(objective.heads, counts.values(), strict=True)}
    if objective.counts_tokens:
        uses[objective.heads[0]] *= objective.predicted_share
    uses |= objective.uses_of_heads(tokens / len(lengths)) if objective.compares else {}
    uses |= dict.fromkeys(objective.idle_heads, 0.0)
    spans = mean_spans(lengths, counted, objective.order, objective.query_share)
    encoded = objective.encoded_tokens(tokens / len(lengths))
    each = flops_per_token(counted, spans, uses, encoded, objective.forward_passes)
    if (teacher := teacher_of(objective)) is not None:
        each = replace(each, teacher=teacher_flops(objective, mean_spans(lengths, census(teacher)), uses))
    return tokens * (each.training if objective.trains_encoder else each.forward)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a GPU's bf16 FLOP/s by its datasheet.

    Args:
        device_name: from torch.
        precision: from Composer; only bf16 rates are known.

    Returns:
        None for an unknown GPU, a CPU, or another precision.
    """
    key = DEVICE_NAMES.get(device_name)
    return None if key is None or precision != "amp_bf16" else GPUS[key].peak_flops


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of tensors on a GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Meter:
    """Measures the steps of one rank.

    Args:
        model: the encoder.
        total_tokens: of the run.
        compute: of this rank.
    """

    def __init__(self, model: ModelConfig, total_tokens: int, compute: Compute) -> None:
        self._model, self._total = model, total_tokens
        self._device = compute.device
        name = torch.cuda.get_device_name(compute.device) if compute.device.type == "cuda" else "cpu"
        self._peak_flops = peak_flops(name, compute.precision)
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)  # seconds and tokens of steps
        self._began: float | None = None  # end of the first step, which compiles and is never counted
        self._in_steps = 0.0  # seconds since then that steps took

    def measure(
        self,
        plan: BatchPlan,
        rows: Sequence[Row],
        counts: Mapping[str, int],
        seconds: float,
        wait_seconds: float,
        texts: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Return the data and the cost of a step, as keys of metrics.jsonl.

        Args:
            plan: of the global batch.
            rows: this rank's rows of it.
            counts: of each loss term in them.
            seconds: of the step, including the wait for its batch.
            wait_seconds: until every rank received its batch.
            texts: see `training_flops`.

        Returns:
            epoch; of several streams epochs, stream_tokens and stream_documents.
            tokens_per_second: of all ranks.
            packing_efficiency: share of the rows that is not padding.
            seconds: as given.
            rank_flops_per_second: model FLOP/s of this rank.
            mfu: their share of the GPU's peak; absent if the peak is unknown.
            data_wait_share: of the step.
            peak_memory_bytes: see `peak_memory_bytes`.
            seconds_left: to the end of the run; see `_seconds_left`.
        """
        speed = training_flops(rows, counts, self._model, plan.objective, texts) / seconds
        metrics = _streams(plan.streams) | {
            "tokens_per_second": plan.tokens / seconds,
            "packing_efficiency": plan.tokens / (plan.num_rows * plan.row_tokens),
            "seconds": seconds,
            "rank_flops_per_second": speed,
        }
        if self._peak_flops is not None:
            metrics["mfu"] = speed / self._peak_flops
        metrics["data_wait_share"] = wait_seconds / seconds
        metrics["peak_memory_bytes"] = peak_memory_bytes(self._device)
        metrics["seconds_left"] = self._seconds_left(plan, seconds, time.monotonic())
        return metrics

    def _seconds_left(self, plan: BatchPlan, seconds: float, now: float) -> float:
        """Estimate the seconds to the end of the run by the speed of the last 50 steps, without the slowest of them.

        Time between steps is added by its share of this process's time so far. A later phase with another cost per
        token, such as longer rows, is not foreseen.
        """
        if self._began is None:
            self._began = now
            recent = [(seconds, plan.tokens)]  # better than nothing
        else:
            self._in_steps += seconds
            self._recent.append((seconds, plan.tokens))
            slowest_last = sorted(self._recent, key=lambda step: step[0] / step[1])
            recent = slowest_last[: max(1, len(slowest_last) - -(-len(slowest_last) // _SLOWEST_PARTS))]
        elapsed = now - self._began
        between = max(0.0, elapsed - self._in_steps) / max(elapsed, _SETTLED_SECONDS)
        seconds_per_token = sum(step[0] for step in recent) / sum(step[1] for step in recent)
        tokens_left = max(0, self._total - plan.tokens_before - plan.tokens)
        return tokens_left * seconds_per_token / (1 - min(between, 0.9))


def _streams(streams: Sequence[StreamCount]) -> dict[str, Any]:
    """Return the epoch; of several streams the epoch of each, and its tokens and documents in the batch."""
    if len(streams) == 1:
        return {"epoch": streams[0].epoch}
    return {
        "epochs": {stream.name: stream.epoch for stream in streams},
        "stream_tokens": {stream.name: stream.tokens for stream in streams},
        "stream_documents": {stream.name: stream.documents for stream in streams},
    }


def scalars(entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flatten a line of metrics.jsonl for loggers, which take plain values: key/stream for several streams."""
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", number) for name, number in value.items())
        else:
            yield key, value
