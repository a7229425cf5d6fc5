"""The steps of a run as columns of numbers, and which of them are drawn.

A hundred runs of many thousand steps are held at once, so a step is a place in some arrays and no object.
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
MOST_TERMS = 8  # loss terms of a run
ROUGH = ("loss", "grad_norm", "update_norm", "tokens_per_second", "data_wait_share")  # whose extremes are kept


class StepRecord(NamedTuple):
    """One optimizer step. `tokens` counts the step itself; what the file does not hold is NaN."""

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
        dropped: how often steps were taken away again; who has read some must then read all.
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
        """Add a step, and the mean of each loss term where there are several."""
        for name, column in self._columns.items():
            column.append(getattr(record, name))
        for name in terms or ():
            if name not in self._terms and len(self._terms) < MOST_TERMS:
                self._terms[name] = array("d", [NAN]) * len(self._phases)
        for name, column in self._terms.items():
            column.append((terms or {}).get(name, NAN))
        self._phases.append(self._names.setdefault(record.phase, len(self._names)))

    def pop(self) -> None:
        """Take the last step away."""
        for column in (*self._columns.values(), *self._terms.values()):
            column.pop()
        self._phases.pop()
        self.dropped += 1

    def column(self, name: str) -> NDArray[np.float64]:
        """A copy of the numbers of one name, or of a loss term."""
        return np.array(self._columns.get(name, self._terms.get(name, ())), dtype=np.float64)

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms."""
        return tuple(self._terms)

    def ranges(self) -> list[tuple[str, int, int]]:
        """(phase, first, end) where the name of the phase stays the same."""
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
        step, *rest = (column[at] for column in self._columns.values())
        return StepRecord(int(step), next(itertools.islice(self._names, self._phases[at], None)), *rest)


def thin(steps: Steps, points: int) -> NDArray[np.int64]:
    """Choose the steps to draw: in each of some equal ranges those with the lowest and the highest of what is ROUGH,
    and one whose loss is not a number, so that spikes and gaps stay.

    Returns:
        Rising places, at most `points` and a few more for the phases: all of them if there are no more.
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
    """Of each chosen step the mean over it and the steps since the chosen one before it, blind to what is not finite.

    So a smoothed curve can be the mean of all steps, though few of them are drawn.
    """
    finite = np.isfinite(values)
    starts = np.concatenate([[0], chosen[:-1] + 1])
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    counts = np.add.reduceat(finite.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(counts > 0, sums / counts, NAN), dtype=np.float64)


def as_json(values: NDArray[np.float64], digits: int = 6) -> list[float | None]:
    """Numbers of so many digits, None for what is not finite; whole numbers are written as such."""
    finite = np.isfinite(values)
    safe = np.where(finite, values, 0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = np.floor(np.log10(np.abs(safe), out=np.zeros_like(safe), where=safe != 0))
        scale = 10.0 ** np.clip(digits - 1 - exponent, -290, 290)
        rounded = np.where(np.abs(safe) >= 10.0**digits, np.rint(safe), np.rint(safe * scale) / scale)
    rounded = np.where(np.isfinite(rounded), rounded, safe)
    if np.all(rounded == np.rint(rounded)) and np.all(np.abs(rounded) < 2**53):
        found: list[float | None] = rounded.astype(np.int64).tolist()
    else:
        found = rounded.tolist()
    if finite.all():
        return found
    return [value if known else None for value, known in zip(found, finite.tolist(), strict=True)]
