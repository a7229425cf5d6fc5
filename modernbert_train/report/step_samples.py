"""The steps of a run as columns of numbers, and the choice of the ones to draw.

A page holds a hundred runs of many thousand steps, so a step is an index into arrays and not an object.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

NAN = math.nan
MAX_TERMS = 8  # maximum loss terms of a run
ROUGH = ("loss", "grad_norm", "update_norm", "tokens_per_second", "data_wait_share")  # their extremes are drawn


class StepRecord(NamedTuple):
    """One optimizer step. `tokens` includes the step itself; values that the file lacks are NaN."""

    step: int
    phase: str
    tokens: float
    rows: float = NAN
    loss: float = NAN
    lr: float = NAN
    grad_norm: float = NAN
    tokens_per_second: float = NAN
    packing_efficiency: float = NAN
    mfu: float = NAN
    data_wait_share: float = NAN
    update_norm: float = NAN
    peak_memory_bytes: float = NAN
    rank_flops_per_second: float = NAN
    seconds: float = NAN  # of training so far, without the pauses between two processes
    own_seconds: float = NAN  # of the step alone
    seconds_left: float = NAN  # to the end of the run


NUMBERS = tuple(name for name in StepRecord._fields if name != "phase")


class Steps(Sequence[StepRecord]):
    """Steps in rising order.

    Attributes:
        dropped: number of steps that were removed again; a reader that sees it change must read all steps again.
    """

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.dropped = 0
        self._columns = {name: array("d") for name in NUMBERS}
        self._terms: dict[str, array[float]] = {}
        self._phases = array("l")
        self._names: dict[str, int] = {}
        for record in records:
            self.append(record)

    def append(self, record: StepRecord, terms: Mapping[str, float] | None = None) -> None:
        """Add a step, and the mean of each loss term if there are several."""
        for name, column in self._columns.items():
            column.append(getattr(record, name))
        for name in terms or ():
            if name not in self._terms and len(self._terms) < MAX_TERMS:
                self._terms[name] = array("d", [NAN]) * len(self._phases)
        for name, column in self._terms.items():
            column.append((terms or {}).get(name, NAN))
        self._phases.append(self._names.setdefault(record.phase, len(self._names)))

    def pop(self) -> None:
        """Remove the last step."""
        for column in (*self._columns.values(), *self._terms.values()):
            column.pop()
        self._phases.pop()
        self.dropped += 1

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a copy of a column, or of a loss term."""
        return np.array(self._columns.get(name, self._terms.get(name, ())), dtype=np.float64)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms."""
        return tuple(self._terms)

    def ranges(self) -> list[tuple[str, int, int]]:
        """Return (phase, first, end) of each range of steps with the same phase name."""
        if not self._phases:
            return []
        codes = np.array(self._phases)
        names = list(self._names)
        cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        return [(names[codes[first]], first, end) for first, end in itertools.pairwise(cuts)]

    def __len__(self) -> int:
        return len(self._phases)

    def __iter__(self) -> Iterator[StepRecord]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> list[StepRecord]: ...

    def __getitem__(self, at: int | slice) -> StepRecord | list[StepRecord]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        step, *others = (column[at] for column in self._columns.values())
        return StepRecord(int(step), next(itertools.islice(self._names, self._phases[at], None)), *others)


def thin(steps: Steps, points: int) -> NDArray[np.int64]:
    """Choose the steps to draw: in equal ranges the lowest and the highest of each ROUGH column, and one step whose
    loss is not a number, so that spikes and gaps stay.

    Returns:
        Ascending indices, at most `points` and a few more for the phases; all of them if there are fewer.
    """
    number = len(steps)
    if number <= points:
        return np.arange(number)
    buckets = max(1, points // (2 * len(ROUGH) + 1))
    width = -(-number // buckets)
    first = np.arange(0, number, width)
    chosen = [np.array([0, number - 1]), np.array([start for _, start, _ in steps.ranges()][:100])]
    for name in ROUGH:
        values = np.full(len(first) * width, NAN)
        values[:number] = steps.column(name)
        table = values.reshape(len(first), width)
        finite = np.isfinite(table)
        some = finite.any(axis=1)
        chosen += [(first + np.where(finite, table, math.inf).argmin(axis=1))[some]]
        chosen += [(first + np.where(finite, table, -math.inf).argmax(axis=1))[some]]
        if name == "loss":
            gaps = first + (~finite).argmax(axis=1)
            chosen += [gaps[(~finite).any(axis=1) & (gaps < number)]]
    return np.unique(np.concatenate(chosen))


def means(values: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return, for each chosen step, the mean of the finite values since the previous chosen step.

    So a smoothed curve can be the mean of all steps, though few of them are drawn.
    """
    finite = np.isfinite(values)
    starts = np.concatenate([[0], chosen[:-1] + 1])
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(counts > 0, sums / counts, NAN), dtype=np.float64)


def as_json(values: NDArray[np.float64], digits: int = 6) -> list[float | None]:
    """Round to significant digits; values that are not finite become None, and whole numbers integers."""
    finite = np.isfinite(values)
    safe = np.where(finite, values, 0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(safe), out=np.zeros_like(safe), where=safe != 0))
        scale = 10.0 ** np.clip(digits - 1 - exponent, -290, 290)
        rounded = np.where(np.abs(safe) >= 10.0**digits, np.rint(safe), np.rint(safe * scale) / scale)
    rounded = np.where(np.isfinite(rounded), rounded, safe)
    if np.all(rounded == np.rint(rounded)) and np.all(np.abs(rounded) < 2**53):
        integers: list[float | None] = rounded.astype(np.int64).tolist()
    else:
        integers = rounded.tolist()
    if finite.all():
        return integers
    return [value if is_finite else None for value, is_finite in zip(integers, finite.tolist(), strict=True)]
