"""Cost of a step: model FLOP/s, their share of what the GPU can do, the wait for data, memory, and the time left.

Nothing here asks the device anything: FLOPs are counted from the lengths of the documents in the batch, times are the
host's, and the allocator keeps its own books on the host. It takes 0.1 ms for 1,728 documents in 576 rows.
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
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.teacher import teacher_flops, teacher_of

# as torch names a GPU -> its key in GPUS; only names whose datasheet is the one that stands there
DEVICE_NAMES = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI250X": "mi250x",
}
_RECENT_STEPS = 50  # whose pace tells the time left
_SLOWEST_PARTS = 20  # one in so many of them, at least one, is left out: it compiled, or waited for something rare
_SETTLED_SECONDS = 600.0  # before, the time between steps (validations, checkpoints) is a share of this


def training_flops(
    rows: Sequence[Row],
    counts: Mapping[str, int],
    model: ModelConfig,
    objective: ObjectiveConfig,
    texts: Sequence[int] | None = None,
) -> float:
    """FLOPs of a forward and a backward pass over some rows, by the true length of each sequence in them; of a frozen
    encoder, and of a teacher, of the forward pass alone. Of pairs that are compared two forward passes.

    Padding, recomputation and what a kernel computes beyond a window do not count; see plan/flops.py.

    Args:
        rows: the chunks in each row.
        counts: of each loss term in them, in the order of `objective.terms`.
        model: the encoder.
        objective: what is trained.
        texts: of pairs that are compared the tokens of each text; None: a chunk is one sequence.
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
    """FLOP/s of a GPU by its datasheet, in bf16.

    Args:
        device_name: as torch gives it.
        precision: as Composer gives it; other rates than those of bf16 are not known here.

    Returns:
        None for an unknown GPU, a CPU, or another precision.
    """
    key = DEVICE_NAMES.get(device_name)
    return None if key is None or precision != "amp_bf16" else GPUS[key].peak_flops


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: that of tensors on a GPU, or of the process where there is none."""
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
        """What a step had and what it cost, as it stands in metrics.jsonl.

        Args:
            plan: of the global batch.
            rows: this rank's rows of it.
            counts: of each loss term in them.
            seconds: that the step took, the wait for its batch included.
            wait_seconds: until every rank had its batch.
            texts: see `training_flops`.

        Returns:
            epoch, or of several streams epochs, stream_tokens and stream_documents.
            tokens_per_second: of all ranks.
            packing_efficiency: share of the rows that is not padding.
            seconds: as given.
            rank_flops_per_second: model FLOP/s of this rank.
            mfu: their share of the GPU's peak; absent where the peak is not known.
            data_wait_share: of the step.
            peak_memory_bytes: see `peak_memory_bytes`.
            seconds_left: to the end of the run; see `_seconds_left`.
        """
        speed = training_flops(rows, counts, self._model, plan.objective, texts) / seconds
        found = _streams(plan.streams) | {
            "tokens_per_second": plan.tokens / seconds,
            "packing_efficiency": plan.tokens / (plan.num_rows * plan.row_tokens),
            "seconds": seconds,
            "rank_flops_per_second": speed,
        }
        if self._peak_flops is not None:
            found["mfu"] = speed / self._peak_flops
        found["data_wait_share"] = wait_seconds / seconds
        found["peak_memory_bytes"] = peak_memory_bytes(self._device)
        found["seconds_left"] = self._seconds_left(plan, seconds, time.monotonic())
        return found

    def _seconds_left(self, plan: BatchPlan, seconds: float, now: float) -> float:
        """To the end of the run, if what is left goes as the last 50 steps did, without the slowest of them.

        What happens between steps is added by its share of this process's time so far. A later phase that is dearer
        or cheaper by the token, as one with longer rows, is not foreseen.
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
        left = max(0, self._total - plan.tokens_before - plan.tokens)
        return left * seconds_per_token / (1 - min(between, 0.9))


def _streams(streams: Sequence[StreamCount]) -> dict[str, Any]:
    """The pass over the training data; of several streams that of each, and what the batch has of it."""
    if len(streams) == 1:
        return {"epoch": streams[0].epoch}
    return {
        "epochs": {stream.name: stream.epoch for stream in streams},
        "stream_tokens": {stream.name: stream.tokens for stream in streams},
        "stream_documents": {stream.name: stream.documents for stream in streams},
    }


def scalars(entry: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A line of metrics.jsonl for loggers, which take plain values: those of several streams as key/stream."""
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", number) for name, number in value.items())
        else:
            yield key, value
