"""metrics.jsonl -> the history of a run, and the two reductions a chart needs (smoothing, thinning).

The file is append-only and may end, or be interrupted, in the middle of a line (kill -9), and a resumed run repeats
the steps after its checkpoint. So reading keeps, for every step, what the surviving weights saw: lines that a later
resume made void are dropped, and how many were dropped is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.errors import DataError
from modernbert_train.read_json import lines_of, number, parse_object, read_lines
from modernbert_train.text import shorten

NAN = math.nan
_MOST = 1e100  # of a figure: any more, and an axis could not be drawn
_MOST_COUNT = 1e18  # of steps and tokens
_MOST_FIGURES = 100  # of an evaluation
_LETTERS = 60  # of the names of an evaluation and its figures


class StepRecord(NamedTuple):
    """One optimizer step. `tokens` counts the step itself; what the file does not hold is NaN."""

    step: int
    phase: str
    tokens: float
    rows: float
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    packing_efficiency: float
    mfu: float
    data_wait_share: float


class ValidationRecord(NamedTuple):
    """One pass over the validation data."""

    step: int
    phase: str
    tokens: float
    loss: float
    accuracy: float
    unigram_loss: float
    unigram_accuracy: float


class EvaluationRecord(NamedTuple):
    """One measurement of `evals`; see evaluations.py."""

    step: int
    phase: str
    tokens: float
    name: str
    figures: Mapping[str, float]


class Restart(NamedTuple):
    """A process that continued the run (or began it again: then `checkpoint` is empty)."""

    step: int
    tokens: float
    checkpoint: str
    time: float


class Fault(NamedTuple):
    """A batch that stability.py skipped, let pass, or ended the run at; `tokens` are those before it."""

    step: int
    tokens: float
    fault: str
    action: str
    loss: float
    checkpoint: str  # that a roll-back went back to
    time: float


class PhaseSteps(NamedTuple):
    """A range of steps with one phase name; `start` and `end` in tokens."""

    name: str
    start: float
    end: float
    steps: list[StepRecord]


@dataclass
class History:
    """Everything in metrics.jsonl that still counts, in order of steps.

    Attributes:
        repeated_steps: step lines made void by a later resume.
        unreadable_lines: lines that are not whole JSON objects.
        running_seconds: time between the first and last line of each process, summed.
        first_time, last_time: unix time of the first and last line; NaN in an empty file.
    """

    steps: list[StepRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    repeated_steps: int = 0
    unreadable_lines: int = 0
    running_seconds: float = 0.0
    first_time: float = NAN
    last_time: float = NAN

    def phases(self) -> list[PhaseSteps]:
        """Split the steps where the phase's name changes. A batch belongs to the phase in which it starts."""
        found: list[PhaseSteps] = []
        for record in self.steps:
            if not found or found[-1].name != record.phase:
                found.append(PhaseSteps(record.phase, found[-1].end if found else 0.0, record.tokens, []))
            found[-1].steps.append(record)
            found[-1] = found[-1]._replace(end=record.tokens)
        return found

    def forget_after(self, step: int) -> None:
        """Drop what happened after a step, because the run went on from there a second time."""
        while self.steps and self.steps[-1].step > step:
            self.steps.pop()
            self.repeated_steps += 1
        self.validations = [v for v in self.validations if v.step <= step]
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        self.faults = [fault for fault in self.faults if fault.step <= step]


def read_history(path: Path) -> History:
    """Read metrics.jsonl, and beside it faults.jsonl, which alone knows of the faults that ended the run, and
    watch.jsonl, which has what `finetune --watch` measured of its checkpoints.

    Raises:
        DataError: the file does not exist or cannot be read. Damaged lines are counted, not raised.
    """
    history = History()
    try:
        for line in filter(bytes.strip, lines_of(path)):
            _add_line(history, line.decode("utf-8", "replace"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Give the folder of a run that has begun training."
        ) from error
    stops = path.with_name("faults.jsonl")
    if stops.is_file():
        try:
            entries, _ = read_lines(stops)
        except OSError as error:
            raise DataError(f"{stops}: cannot be read ({error.strerror}). Fix the disk or the permission.") from error
        history.faults += [_fault(entry) for entry in entries if entry.get("action") == "stop"]
    _add_watched(history, path.with_name("watch.jsonl"))
    return history


def _add_watched(history: History, file: Path) -> None:
    """Evaluations by another process, in order of tokens among the run's own."""
    if not file.is_file():
        return
    found = History()
    for line in filter(bytes.strip, lines_of(file)):
        _add_line(found, line.decode("utf-8", "replace"))
    history.evaluations = sorted([*history.evaluations, *found.evaluations], key=lambda each: each.tokens)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, blind to values that are not finite.

    At the start the window shrinks on both sides, so that a steep beginning is not flattened; at the end it loses its
    right half only, so that the last value is the mean of window // 2 + 1 values and not a single noisy one.

    Returns:
        As many values; NaN where the input is not finite, so that a gap stays a gap.
    """
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    smoothed = []
    for i, value in enumerate(values):
        half = min(window // 2, i)
        low, high = i - half, min(i + half + 1, len(values))
        smoothed.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if math.isfinite(value) else NAN)
    return smoothed


def thin(x: Sequence[float], y: Sequence[float], buckets: int = 600) -> list[int]:
    """Choose the points to draw: in each of `buckets` equal ranges of x the lowest, the highest and one gap.

    Args:
        x: rising positions.
        y: values; not finite is a gap.

    Returns:
        Rising indices, the first and last always among them; all of them if there are at most 2 * buckets.
    """
    if len(x) <= 2 * buckets:
        return list(range(len(x)))
    span = (x[-1] - x[0]) or 1.0
    members: dict[int, list[int]] = {}
    for i, position in enumerate(x):
        members.setdefault(min(int((position - x[0]) / span * buckets), buckets - 1), []).append(i)
    chosen = {0, len(x) - 1}
    for indices in members.values():
        finite = [i for i in indices if math.isfinite(y[i])]
        if finite:
            chosen |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
        if len(finite) < len(indices):
            chosen.add(next(i for i in indices if not math.isfinite(y[i])))
    return sorted(chosen)


def _add_line(history: History, line: str) -> None:
    record = parse_object(line)
    if record is None and (again := line.rfind('{"kind"')) > 0:  # a new process wrote behind a torn line
        history.unreadable_lines += 1
        record = parse_object(line[again:])
    if record is None:
        history.unreadable_lines += 1
        return
    kind, step, tokens = record.get("kind"), int(_number(record, "step", 0.0)), _number(record, "tokens", 0.0)
    phase = str(record.get("phase", ""))
    _add_time(history, _number(record, "time"), new_process=kind in ("start", "resume"))
    if kind in ("start", "resume"):
        if history.steps or kind == "resume":
            checkpoint = str(record.get("checkpoint", ""))
            history.restarts.append(Restart(step, tokens, checkpoint, _number(record, "time")))
        history.forget_after(step)
    elif kind == "step":
        if history.steps and history.steps[-1].step >= step:  # the line that told of the resume was lost
            history.forget_after(step - 1)
        rest = [_number(record, key) for key in StepRecord._fields[3:]]
        history.steps.append(StepRecord(step, phase, tokens, *rest))
    elif kind == "validation":
        rest = [_number(record, key) for key in ValidationRecord._fields[3:]]
        history.validations = [v for v in history.validations if (v.step, v.phase) != (step, phase)]
        history.validations.append(ValidationRecord(step, phase, tokens, *rest))
    elif kind == "evaluation":
        name, figures = shorten(str(record.get("name", "")), _LETTERS), record.get("figures")
        figures = figures if isinstance(figures, dict) else {}
        numbers = {shorten(key, _LETTERS): _number(figures, key) for key in list(figures)[:_MOST_FIGURES]}
        history.evaluations = [e for e in history.evaluations if e[:4] != (step, phase, tokens, name)]
        history.evaluations.append(EvaluationRecord(step, phase, tokens, name, numbers))
    elif kind == "fault":
        history.faults.append(_fault(record))


def _fault(record: dict[str, Any]) -> Fault:
    return Fault(
        step=int(_number(record, "step", 0.0)),
        tokens=_number(record, "tokens_before", 0.0),
        fault=str(record.get("fault", "")),
        action=str(record.get("action", "")),
        loss=_number(record, "loss"),
        checkpoint=str(record.get("to", "")),
        time=_number(record, "time"),
    )


def _add_time(history: History, time: float, new_process: bool) -> None:
    if not math.isfinite(time):
        return
    if math.isnan(history.first_time):
        history.first_time = time
    elif not new_process:
        history.running_seconds += max(0.0, time - history.last_time)
    history.last_time = time


def _number(record: dict[str, Any], key: str, missing: float = NAN) -> float:
    """A number of a record; what no run can have written there is missing: the file may hold anything."""
    value = number(record.get(key))
    if value is None or (missing == 0.0 and not 0 <= value < _MOST_COUNT) or _MOST < abs(value) < math.inf:
        return missing
    return value
