"""The numbers of a run: tiles for the whole, a table by phase, and what a reader must not overlook."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from modernbert_train.effective import FORMULA, Spent
from modernbert_train.report.curves import History, StepRecord, ValidationRecord
from modernbert_train.report.evaluations import NUMBER, last_figures
from modernbert_train.text import date, duration, fixed, percent, plural, rate, tokens_text, whole

LOSS, ACCURACY = fixed(3), percent(2)


def smoothing_window(steps: Sequence[StepRecord]) -> int:
    """Steps averaged in a smoothed curve: a fiftieth of the run between 9 and 201, odd."""
    return min(max(len(steps) // 50, 8), 200) | 1


def tiles(history: History, spent: Spent | None = None) -> str:
    """The whole run as a list of named numbers."""
    steps, last = history.steps, history.validations[-1] if history.validations else None
    pause = history.last_time - history.first_time - history.running_seconds
    facts = [
        ("Tokens", tokens_text(steps[-1].tokens) if steps else "0", whole(steps[-1].tokens) if steps else ""),
        ("Steps", whole(steps[-1].step) if steps else "0", f"{plural(history.repeated_steps, 'step')} repeated"),
        ("Training loss", _shown(_final(steps), LOSS), f"mean of last {plural(_tail(steps), 'step')}"),
        ("Validation loss", LOSS(last.loss) if last else "none", _validated(last)),
        ("Unigram baseline", LOSS(last.unigram_loss) if last else "none", "loss of guessing"),
        ("Accuracy", ACCURACY(last.accuracy) if last else "none", _accuracy_to_beat(last)),
        ("Tokens per second", _shown(_median(steps, "tokens_per_second"), whole), "median over steps"),
        ("Packing efficiency", _shown(_median(steps, "packing_efficiency"), percent(2)), "median over steps"),
        ("Wall time", duration(history.running_seconds), f"and {duration(pause)} paused" if pause >= 1 else "no pause"),
        ("Restarts", whole(len(history.restarts)), _last_restart(history)),
    ]
    if spent is not None:
        blocked, most = sum(spent.blocked), max(spent.blocked, default=0.0)
        facts += [
            ("Effective training time", _shown(spent.effective, percent(1)), FORMULA),
            ("Blocked by checkpoints", f"{blocked:.3g} s", f"by {len(spent.blocked)}, at most {most:.2g} s by one"),
            ("Last checkpoint", "none" if spent.last_saved is None else f"step {spent.last_saved:,}", "in the record"),
            ("Restart time", spent.restart_text, "from the last line of a process to the next one's first step"),
        ]
    found = "".join(f"<div><dt>{a}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in facts)
    return f'<dl class="summary box">{found}</dl>'


class Figure(NamedTuple):
    """One number of a run: as it is sorted by (not a number where there is none), and as it is shown."""

    value: float
    text: str


NONE = Figure(math.nan, "none")


def figures(history: History) -> dict[str, Figure]:
    """What a run came to, by the heads of a table's columns."""
    steps, last = history.steps, history.validations[-1] if history.validations else None
    tokens, number = (steps[-1].tokens, steps[-1].step) if steps else (0, 0)

    def shown(value: float, text: Callable[[float], str]) -> Figure:
        return Figure(value, _shown(value, text))

    return {
        "Training loss": shown(_final(steps), LOSS),
        "Validation loss": Figure(last.loss, LOSS(last.loss)) if last else NONE,
        "Accuracy": Figure(last.accuracy, ACCURACY(last.accuracy)) if last else NONE,
        "Tokens": shown(tokens, tokens_text),
        "Steps": shown(number, whole),
        "Tokens/s": shown(_median(steps, "tokens_per_second"), whole),
        "MFU": shown(_median(steps, "mfu"), percent(1)),
        "Data wait": shown(_median(steps, "data_wait_share"), percent(1)),
        "Wall time": shown(history.running_seconds, duration),
        "Restarts": shown(len(history.restarts), whole),
        "Faults": shown(len(history.faults), whole),
    } | {head: shown(value, NUMBER) for head, value in last_figures(history).items()}


def phase_table(history: History) -> str:
    """One line per phase; empty if no step was recorded."""
    heads = (
        "Phase",
        "Tokens",
        "Steps",
        "Peak rate",
        "Rows",
        "Training loss",
        "Validation loss",
        "Accuracy",
        "Tokens/s",
    )
    lines = []
    for phase in history.phases():
        checks = [v for v in history.validations if v.phase == phase.name]
        rows = sorted({s.rows for s in phase.steps if math.isfinite(s.rows)})
        cells = (
            phase.name,
            tokens_text(phase.end - phase.start),
            whole(len(phase.steps)),
            rate(max((s.lr for s in phase.steps if math.isfinite(s.lr)), default=0.0)),
            " to ".join(whole(r) for r in dict.fromkeys(rows[:1] + rows[-1:])),
            _shown(_final(phase.steps), LOSS),
            LOSS(checks[-1].loss) if checks else "none",
            ACCURACY(checks[-1].accuracy) if checks else "none",
            _shown(_median(phase.steps, "tokens_per_second"), whole),
        )
        lines.append("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + "</tr>")
    if not lines:
        return ""
    head = "".join(f"<th>{h}</th>" for h in heads)
    return f'<div class="box wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def warnings(history: History, name: str = "") -> str:
    """What the curves could hide: losses that are not numbers, damaged lines; of a run by name among several."""
    prefix = f"{name}: " if name else ""
    notes = []
    if broken := [s for s in history.steps if not math.isfinite(s.loss)]:
        notes.append(
            f"{plural(len(broken), 'step')} with a loss that is not a number, first at step {broken[0].step:,}; "
            "the curves have gaps there."
        )
    if history.unreadable_lines:
        notes.append(
            f"{plural(history.unreadable_lines, 'line')} of metrics.jsonl could not be read and was left out; "
            "a process killed while writing leaves one."
        )
    return "".join(f'<p class="box note warn">{escape(prefix + n)}</p>' for n in notes)


def where_text(record: StepRecord) -> str:
    return f"step {record.step:,} · {tokens_text(record.tokens, 4)} tokens · {record.phase}"


def header_note(last_time: float) -> str:
    last = date(last_time)
    return f"All charts over tokens seen, padding not counted. {f'Last log line {last}.' if last else ''}"


def _tail(steps: Sequence[StepRecord]) -> int:
    """Steps behind the last value of a smoothed curve."""
    return min(len(steps), smoothing_window(steps) // 2 + 1)


def _final(steps: Sequence[StepRecord]) -> float:
    """Training loss at the end; not a number where no loss is one."""
    losses = [s.loss for s in steps[len(steps) - _tail(steps) :] if math.isfinite(s.loss)]
    return statistics.fmean(losses) if losses else math.nan


def _median(steps: Sequence[StepRecord], name: str) -> float:
    values = [value for step in steps if math.isfinite(value := getattr(step, name))]
    return statistics.median(values) if values else math.nan


def _shown(value: float, text: Callable[[float], str]) -> str:
    return text(value) if math.isfinite(value) else "none"


def _validated(last: ValidationRecord | None) -> str:
    return f"at {tokens_text(last.tokens)} tokens" if last else "no validation yet"


def _accuracy_to_beat(last: ValidationRecord | None) -> str:
    return f"baseline {ACCURACY(last.unigram_accuracy)}" if last else "no validation yet"


def _last_restart(history: History) -> str:
    if not history.restarts:
        return "ran through"
    return f"last at {tokens_text(history.restarts[-1].tokens)} tokens"
