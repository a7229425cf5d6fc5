"""Timing for benchmarks of single parts: interleaved cases, and the floors that they are compared with.

A case is a list of stages, each called with the previous one's result: forward, then backward. All cases of a group
alternate, round by round, so that a busy machine disturbs all equally. The floor of a stage is the larger of its FLOPs
at the rate of a large matrix product and its bytes at the rate of a large copy, both measured in the same run. On a
GPU, times are between CUDA events, after writing 1 GiB, so that the L2 cache is cold and the host is ahead of the
device. A failing case is a line with its error, and the others continue.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.timing import between, mark, wait

WARM_UP = 2  # rounds before the first that counts: compilation, allocation
_COLD_BYTES = 1 << 30


class Unusable(Exception):
    """The measured feature is unavailable here; the text says why."""


class Work(NamedTuple):
    """The minimum that any implementation must compute and move, and the tokens that it handles; 0 if unknown."""

    flops: float = 0.0
    bytes: float = 0.0
    tokens: float = 0.0


NO_WORK = Work()


class Stage(NamedTuple):
    """A part of a case.

    Attributes:
        name: in the table; "" is not timed.
        call: gets the previous stage's result, the first one None.
        work: defines its floor.
    """

    name: str
    call: Callable[[Any], Any]
    work: Work = NO_WORK


@dataclass(frozen=True)
class Case:
    """A case, one or several lines of a table; `build` prepares everything that is not timed and returns the stages."""

    name: str
    build: Callable[[], list[Stage]]


@dataclass(frozen=True)
class Group:
    """Cases that do the same work and alternate."""

    title: str
    cases: list[Case]


@dataclass(frozen=True)
class Rates:
    """The device's measured rates per second: FLOPs of a large matrix product, bytes moved by a large copy."""

    flops: float
    bytes: float


@dataclass
class Line:
    """The measurements of one stage, or the reason for their absence.

    Attributes:
        ms: milliseconds of each round.
        cpu_ms: CPU time of this process in it; with a GPU that is the cost of launching, waits included.
        floor_ms: the minimum that the device needs; 0 if there is no floor.
        peak_bytes: allocated on the GPU in addition to the memory before the case's first stage.
    """

    case: str
    stage: str = ""
    ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    work: Work = NO_WORK
    floor_ms: float = 0.0
    peak_bytes: int = 0
    error: str = ""

    def figures(self) -> dict[str, Any]:
        """Return numbers and names for a JSON file."""
        if self.error:
            return {"case": self.case, "error": self.error}
        took = median(self.ms)
        return {
            "case": self.case,
            "stage": self.stage,
            "ms": took,
            "min_ms": min(self.ms),
            "cpu_ms": median(self.cpu_ms),
            "flops_per_second": 1e3 * self.work.flops / took,
            "bytes_per_second": 1e3 * self.work.bytes / took,
            "tokens_per_second": 1e3 * self.work.tokens / took,
            "floor_ms": self.floor_ms,
            "x_floor": took / self.floor_ms if self.floor_ms else None,
            "peak_bytes": self.peak_bytes,
        }


def fastest_ms(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    times = []
    for _ in range(rounds):
        begin = mark(device)
        call()
        end = mark(device)
        wait(device)
        times.append(between(begin, end)[0])
    return min(times)


def measure_rates(device: torch.device, dtype: torch.dtype, matrix_size: int, copied_floats: int) -> Rates:
    """Return the best of ten matrix products of random numbers, and of ten copies."""
    source, target = (torch.ones(copied_floats, device=device) for _ in range(2))
    copied = 2 * source.nbytes / fastest_ms(lambda: target.copy_(source), device)
    a, b = (torch.randn(matrix_size, matrix_size, device=device).to(dtype) for _ in range(2))
    computed = 2 * matrix_size**3 / fastest_ms(lambda: a @ b, device)
    return Rates(1e3 * computed, 1e3 * copied)


def take_turns(cases: list[Case], rounds: int, device: torch.device, rates: Rates) -> Iterator[Line]:
    """Build all cases, run them alternately for `rounds` rounds, and yield their lines in order."""
    cold = torch.empty(_COLD_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    stages: dict[str, list[Stage]] = {}
    lines: dict[str, list[Line]] = {}
    for index in range(-1, rounds):  # at -1 each case is built and warmed up
        for case in cases:
            if index >= 0 and case.name not in stages:
                continue  # it has failed
            try:
                if index < 0:
                    stages[case.name] = case.build()
                    lines[case.name] = [
                        Line(case.name, stage.name, work=stage.work) for stage in stages[case.name] if stage.name
                    ]
                    for _ in range(WARM_UP):
                        _run(stages[case.name], lines[case.name], device, cold)
                    for line in lines[case.name]:
                        line.ms, line.cpu_ms, line.peak_bytes = [], [], 0
                else:
                    _run(stages[case.name], lines[case.name], device, cold)
            except Exception as error:
                stages.pop(case.name, None)
                lines[case.name] = [Line(case.name, error=reason(error))]
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    for case in cases:
        for line in lines[case.name]:
            line.floor_ms = 1e3 * max(line.work.flops / rates.flops, line.work.bytes / rates.bytes)
            yield line


def reason(error: Exception) -> str:
    """Return an error in one line."""
    text = (str(error).strip().splitlines() or [""])[0][:160]
    return text if isinstance(error, Unusable) else f"{type(error).__name__}: {text}"


def _run(stages: list[Stage], lines: list[Line], device: torch.device, cold: torch.Tensor | None) -> None:
    """Run the stages once; each named one adds to its line."""
    before = 0
    if cold is not None:
        torch.cuda.synchronize()
        cold.zero_()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    value, marks = None, [mark(device)]
    for stage in stages:
        value = stage.call(value)
        marks.append(mark(device))
    wait(device)
    peak = torch.cuda.max_memory_allocated() - before if cold is not None else 0
    spans = [between(*ends) for ends, stage in zip(pairwise(marks), stages, strict=True) if stage.name]
    for line, (ms, cpu_ms) in zip(lines, spans, strict=True):
        line.ms.append(ms)
        line.cpu_ms.append(cpu_ms)
        line.peak_bytes = max(line.peak_bytes, peak)
