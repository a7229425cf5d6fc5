"""Several runs -> one page: their curves over tokens in the same charts, what they came to, and what differs in them.

Like the page of one run it depends on nothing but the runs' folders, and is one file without any request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modernbert_train.config.read import read_yaml
from modernbert_train.report.chart import Chart, Event, Line, Marks
from modernbert_train.report.curves import StepRecord, read_history, smooth
from modernbert_train.report.evaluations import compared_charts
from modernbert_train.report.html import marks_of
from modernbert_train.report.page import render, write
from modernbert_train.report.runs_table import Run, runs_table, settings_table
from modernbert_train.report.series import shapes
from modernbert_train.report.summary import header_note, smoothing_window, warnings
from modernbert_train.text import fixed, percent, rate, short, shorten, tokens_text, whole

_PLACES = 500  # that the crosshair tells apart
_WARNINGS = 4  # shown at once; more of them are folded


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Draw several runs into one page.

    Args:
        folders: of the runs.
        out: the page; an older one is replaced whole or not at all.

    Returns:
        `out`.

    Raises:
        DataError: a folder has no metrics.jsonl.
        StorageError: the page cannot be written.
    """
    histories = [read_history(folder / "metrics.jsonl") for folder in folders]
    settings = [_settings(folder / "config.yaml") for folder in folders]
    runs = [Run(*each) for each in zip(_names(folders), histories, settings, strict=True)]
    return write(out, render_comparison(runs))


def render_comparison(runs: Sequence[Run]) -> str:
    """Build the page."""
    marks = _marks(runs)
    places = [marks.end * i / _PLACES for i in range(_PLACES + 1)]
    return render(
        shorten(", ".join(run.name for run in runs), 100),
        f"{len(runs)} runs",
        header_note(max((run.history.last_time for run in runs), key=lambda time: (math.isfinite(time), time))),
        _charts(runs),
        marks,
        places=[(place, f"{tokens_text(place, 4)} tokens") for place in places],
        resting="",
        above=f"{shapes()}{_warnings(runs)}\n{runs_table(runs)}",
        below=settings_table(runs),
        more="compare",
    )


def _warnings(runs: Sequence[Run]) -> str:
    found = [text for run in runs if (text := warnings(run.history, run.name))]
    shown = "".join(found)
    if len(found) <= _WARNINGS:
        return shown
    return f'<details class="box"><summary>Warnings of {len(found)} runs</summary>{shown}</details>'


def _charts(runs: Sequence[Run]) -> list[Chart]:
    def exact(pick: Callable[[StepRecord], float]) -> list[Line]:
        return [
            Line(run.name, "main", [s.tokens for s in run.history.steps], [pick(s) for s in run.history.steps], number)
            for number, run in enumerate(runs)
        ]

    def smoothed(pick: Callable[[StepRecord], float]) -> list[Line]:
        return [
            Line(line.name, "main", line.x, smooth(line.y, smoothing_window(run.history.steps)), line.run)
            for line, run in zip(exact(pick), runs, strict=True)
        ]

    validation = [
        Line(
            run.name, "main", [v.tokens for v in run.history.validations], [v.loss for v in run.history.validations], n
        )
        for n, run in enumerate(runs)
    ]
    charts = [
        Chart("Training loss, smoothed, nats per predicted token", smoothed(lambda s: s.loss), fixed(3), short, True),
        Chart("Validation loss, nats per predicted token", validation, fixed(3), short, log=True),
        Chart("Gradient norm, smoothed", smoothed(lambda s: s.grad_norm), short, short, log=True),
        Chart("Learning rate", exact(lambda s: s.lr), rate, rate, low=0.0),
        Chart("Batch size, rows", exact(lambda s: s.rows), whole, whole, low=0.0),
        Chart("Tokens per second", smoothed(lambda s: s.tokens_per_second), whole, tokens_text, low=0.0),
    ]
    shares = {
        "Model FLOP/s, share of the GPU's peak": smoothed(lambda s: s.mfu),
        "Waiting for data, share of the step": smoothed(lambda s: s.data_wait_share),
    }
    charts += [
        Chart(title, lines, percent(2), percent(2), low=0.0)
        for title, lines in shares.items()
        if any(math.isfinite(value) for line in lines for value in line.y)
    ]
    return charts + compared_charts([(run.name, run.history) for run in runs])


def _marks(runs: Sequence[Run]) -> Marks:
    """Restarts and faults of every run; phases only where all runs have the same at the same places."""
    own = [marks_of(run.history) for run in runs]
    end = max(marks.end for marks in own)
    places = {tuple((name, round(100 * start / (end or 1))) for start, name in marks.boundaries) for marks in own}
    return Marks(
        end=end,
        boundaries=own[0].boundaries if len(places) == 1 else (),
        restarts=_of_all(runs, [marks.restarts for marks in own]),
        faults=_of_all(runs, [marks.faults for marks in own]),
    )


def _of_all(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> list[Event]:
    """The events of each run, with its name and number."""
    return [
        Event(event.tokens, f"{run.name}: {event.label}", number)
        for number, (run, found) in enumerate(zip(runs, events, strict=True))
        for event in found
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two are the same."""
    names = [folder.resolve().name for folder in folders]
    return [
        name if names.count(name) == 1 else str(folder.resolve()) for name, folder in zip(names, folders, strict=True)
    ]


def _settings(file: Path) -> dict[str, str]:
    """Every value of a configuration by its dotted key. It is not checked: an older version may have written it."""
    found: dict[str, str] = {}

    def walk(tree: Mapping[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping) and value:
                walk(value, f"{path}{key}.")
            else:
                found[f"{path}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)

    walk(read_yaml(file, {}, []), "")
    return found
