"""Read metrics.jsonl into the history of a run, also while it grows.

The file is append-only and may end, or be interrupted, in the middle of a line (kill -9), and a resumed run repeats
the steps after its checkpoint. So the history keeps, for every step, the line that the surviving weights saw. It drops
and counts lines that a later resume made void.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.config.evals import BASELINE, COUNT
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import number, open_file, parse_object, read_lines
from modernbert_train.core.text import shorten
from modernbert_train.errors import DataError
from modernbert_train.report.effective import cost_of
from modernbert_train.report.step_samples import NAN, NUMBERS, StepRecord, Steps

_MAX_FIGURE = 1e100  # an axis cannot show more
_MAX_COUNT = 1e18  # maximum number of steps and tokens
_MAX_FIGURES = 100  # maximum figures of an evaluation
_LETTERS = 60  # maximum characters in the name of an evaluation or a figure
_PHASE_LETTERS = 1000
_CHUNK = 1 << 22  # bytes read at once
_MAX_LINE = 1 << 24  # bytes; a longer line is damaged
_REMEMBERED = 4096  # last bytes read, which show whether the file is still the same
_TERM = "loss/"  # prefix of the columns of loss terms
_FAULTS = {"non_finite": "loss or gradient not finite", "spike": "the loss jumped"}
_ACTIONS = {"ignore": "let pass", "skip": "update left out", "stop": "run stopped"}


class ValidationRecord(NamedTuple):
    """One pass over the validation data."""

    step: int
    phase: str
    tokens: float
    loss: float
    accuracy: float
    unigram_loss: float
    unigram_accuracy: float
    figures: Mapping[str, float] = {}  # of other loss terms


class EvaluationRecord(NamedTuple):
    """One measurement of `evals`: figures by name, with baselines and counts."""

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

    @property
    def what(self) -> str:
        return "restart"

    @property
    def action_text(self) -> str:
        return f"from {self.checkpoint or 'scratch'}"


class Fault(NamedTuple):
    """A batch that stability.py skipped, let pass, or ended the run at; `tokens` counts the tokens before it."""

    step: int
    tokens: float
    fault: str
    action: str
    loss: float
    checkpoint: str  # target of a roll-back
    time: float

    @property
    def what(self) -> str:
        return _FAULTS.get(self.fault, self.fault)

    @property
    def action_text(self) -> str:
        return f"back to {self.checkpoint}" if self.checkpoint else _ACTIONS.get(self.action, self.action)


class PhaseSteps(NamedTuple):
    """A range of steps with one phase name; `start` and `end` in tokens, `first` and `stop` as indices of steps."""

    name: str
    start: float
    end: float
    first: int
    stop: int


@dataclass
class History:
    """Every line of metrics.jsonl that still counts, in order of steps.

    Attributes:
        repeated_steps: step lines made void by a later resume.
        unreadable_lines: lines that are not whole JSON objects.
        running_seconds: time between the first and last line of each process, summed.
        first_time, last_time: unix time of the first and last line; NaN in an empty file.
        earliest, latest: smallest and largest time of all lines, in case the clock was set back.
        saved: cost of each checkpoint, by step; see `effective.cost_of`.
    """

    steps: Steps = field(default_factory=Steps)
    validations: list[ValidationRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    repeated_steps: int = 0
    unreadable_lines: int = 0
    running_seconds: float = 0.0
    first_time: float = NAN
    last_time: float = NAN
    earliest: float = NAN
    latest: float = NAN
    saved: dict[int, tuple[float, float]] = field(default_factory=dict)

    def phases(self) -> list[PhaseSteps]:
        """Split the steps where the phase's name changes. A batch belongs to the phase in which it starts."""
        ranges = self.steps.ranges()
        ends = [0.0, *(self.steps[stop - 1].tokens for _, _, stop in ranges)]
        return [PhaseSteps(name, ends[i], ends[i + 1], first, stop) for i, (name, first, stop) in enumerate(ranges)]

    def by_figure(self) -> dict[tuple[str, str], list[EvaluationRecord]]:
        """Return the records of each (evaluation, figure), in order; baselines and counts are no figures."""
        records: dict[tuple[str, str], list[EvaluationRecord]] = {}
        for record in self.evaluations:
            for figure in record.figures:
                if not figure.startswith((BASELINE, COUNT)):
                    records.setdefault((record.name, figure), []).append(record)
        return records

    def forget_after(self, step: int) -> None:
        """Drop all records after a step, because the run continued from there a second time."""
        while self.steps and self.steps[-1].step > step:
            self.steps.pop()
            self.repeated_steps += 1
        self.validations = [v for v in self.validations if v.step <= step]
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        self.faults = [fault for fault in self.faults if fault.step <= step]
        self.saved = {each: cost for each, cost in self.saved.items() if each <= step}


class Tail:
    """Reader of a growing file of lines; it starts over if the file was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._before, self._rest = -1, 0, b"", b""

    def read(self) -> tuple[list[str], bool, bool]:
        """Read the next complete lines, at most some megabytes.

        Returns:
            The lines; True if they are the first ones of the file, and all lines before are void; True if there are
            more.

        Raises:
            OSError: it cannot be read.
        """
        with open_file(self._path) as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, self._offset - len(self._before)))
            restarted = status.st_ino != self._inode or status.st_size < self._offset
            if restarted or file.read(len(self._before)) != self._before:
                restarted = True
                self._inode, self._offset, self._before, self._rest = status.st_ino, 0, b"", b""
                file.seek(0)
            new = file.read(_CHUNK)
        self._offset += len(new)
        self._before = (self._before + new)[-_REMEMBERED:]
        *lines, unfinished = new.split(b"\n")
        if lines:
            lines[0], self._rest = self._rest + lines[0], b""
        if len(self._rest) < _MAX_LINE:  # a longer line is damaged, so its beginning is enough
            self._rest += unfinished
        return [line.decode("utf-8", "replace") for line in lines], restarted, len(new) == _CHUNK

    def unfinished(self) -> str:
        """Return the last line, still without a newline; after a kill it never gets one."""
        return self._rest.decode("utf-8", "replace")


class Following:
    """The history of a run that may still grow: metrics.jsonl, and faults.jsonl, the only record of the faults that
    ended the run.

    Args:
        path: of metrics.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = Tail(path)
        self._own = History()
        self._stops: list[Fault] = []
        self._faults_state: tuple[int, ...] | None = None

    def refresh(self, seconds: float = math.inf) -> tuple[bool, bool]:
        """Read new lines.

        Args:
            seconds: time limit; the next call reads the rest.

        Returns:
            True if anything has changed; True if there is more to read.

        Raises:
            DataError: a file cannot be read. Damaged lines are counted, not raised.
        """
        until, changed, more = time.monotonic() + seconds, False, True
        with os_errors_as(
            DataError, f"{self._path}: cannot be read", "Give the folder of a run that has begun training."
        ):
            while more and (time.monotonic() < until or not changed):
                lines, restarted, more = self._tail.read()
                dropped = self._own.steps.dropped + 1
                if restarted:
                    self._own = History()
                    self._own.steps.dropped = dropped
                for line in filter(str.strip, lines):
                    _add_line(self._own, line)
                changed = changed or restarted or bool(lines)
        return self._read_faults() or changed, more

    def finish(self) -> None:
        """Read a last line that lacks its newline; it counts as unreadable if it is cut short."""
        if (line := self._tail.unfinished()).strip():
            _add_line(self._own, line)

    @property
    def history(self) -> History:
        """The history read so far."""
        return replace(self._own, faults=self._own.faults + self._stops)

    def _read_faults(self) -> bool:
        stops = self._path.with_name("faults.jsonl")
        state = state_of(stops)
        if state == self._faults_state:
            return False
        self._faults_state = state
        with os_errors_as(DataError, f"{stops}: cannot be read", "Fix the disk or the permission."):
            entries = read_lines(stops)[0] if stops.is_file() else []
        self._stops = [_fault(entry) for entry in entries if entry.get("action") == "stop"]
        return True


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Return values that change whenever the file does; None if there is no file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


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
        if history.steps and history.steps[-1].step >= step:  # the line of the resume was lost
            history.forget_after(step - 1)
        number_of = {key: _number(record, key) for key in NUMBERS[2:]} | {
            "seconds": history.running_seconds,
            "own_seconds": _number(record, "seconds"),
        }
        terms = {key: _number(record, key) for key in record if key.startswith(_TERM) and len(key) < _LETTERS}
        history.steps.append(StepRecord(step, shorten(phase, _PHASE_LETTERS), tokens, **number_of), terms)
    elif kind == "validation":
        others = {key: _number(record, key) for key in ValidationRecord._fields[3:-1]}
        history.validations = [v for v in history.validations if (v.step, v.phase) != (step, phase)]
        more = {key: _number(record, key) for key in record if "/" in key and len(key) < _LETTERS}
        more = dict(list(more.items())[:_MAX_FIGURES])
        history.validations.append(ValidationRecord(step, phase, tokens, **others, figures=more))
    elif kind == "evaluation":
        name, figures = shorten(str(record.get("name", "")), _LETTERS), record.get("figures")
        figures = figures if isinstance(figures, dict) else {}
        numbers = {shorten(key, _LETTERS): _number(figures, key) for key in list(figures)[:_MAX_FIGURES]}
        history.evaluations = [e for e in history.evaluations if e[:4] != (step, phase, tokens, name)]
        history.evaluations.append(EvaluationRecord(step, phase, tokens, name, numbers))
    elif kind == "fault":
        history.faults.append(_fault(record))
    elif kind == "checkpoint":
        history.saved[step] = cost_of(record)


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
    if time > 0:
        history.earliest, history.latest = min(time, history.earliest), max(time, history.latest)
    if math.isnan(history.first_time):
        history.first_time = time
    elif not new_process:
        history.running_seconds += max(0.0, time - history.last_time)
    history.last_time = time


def _number(record: dict[str, Any], key: str, missing: float = NAN) -> float:
    """Return a number of a record; `missing` for a value that no run can have written: the file may hold anything."""
    value = number(record.get(key))
    if value is None or (missing == 0.0 and not 0 <= value < _MAX_COUNT) or _MAX_FIGURE < abs(value) < math.inf:
        return missing
    return value
