"""Build the data of a page of runs: for each run columns of numbers, tables of text, its configuration and samples.

The page is the same for one run and for a hundred, drawn into a file or served while they train. A run is read as it
grows, and a page that already shows it receives only the new part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from modernbert_train.checkpoints.evaluations import read_results
from modernbert_train.checkpoints.provenance import STARTS, read_starts
from modernbert_train.config.evals import BASELINE, BITS_PER_BYTE
from modernbert_train.config.read_yaml import read_yaml
from modernbert_train.core.read_json import read_lines
from modernbert_train.core.text import date, shorten
from modernbert_train.core.trees import dotted
from modernbert_train.data.statistics import DATA
from modernbert_train.errors import DataError
from modernbert_train.report.curves import Following, History, state_of
from modernbert_train.report.data_json import pictures, read_data
from modernbert_train.report.read_samples import read_samples
from modernbert_train.report.run_list import in_use, run_state
from modernbert_train.report.step_samples import NAN, ROUGH, as_json, means, thin
from modernbert_train.report.summary import Newest, figures, progress_tiles, spent_in, tiles, warnings
from modernbert_train.report.tables import MAX_FIGURES, run_tables

POINTS = 2_000  # steps of a run that are drawn, up to a few more while it grows
ALL_POINTS = 200_000  # steps of all runs of a page
MIN_POINTS = 200  # steps of a run, on a page of any number of runs
_EVENTS = 500  # maximum marks of a run, the last ones
_GROWS = 1.25  # a run with this many times POINTS steps is thinned again
_SMOOTHED = (*ROUGH, "mfu", "rank_flops_per_second", "packing_efficiency")
_WHOLE = ("step", "tokens")
_CONFIG = 100_000  # maximum characters of a configuration
_LETTERS = 2_000  # maximum characters of a value in it
_NAME = 200  # maximum characters of a name


class Chart(NamedTuple):
    """A chart of the steps of runs.

    Attributes:
        column: of the steps.
        title: of the chart.
        form: of its values: number, rate, percent, count, bytes.
        log: True if the axis is logarithmic by default.
        zero: True if the axis begins at 0.
        smooth: True if a reader may smooth it.
    """

    column: str
    title: str
    form: str = "number"
    log: bool = False
    zero: bool = True
    smooth: bool = False


CHARTS = (
    Chart("loss", "Training loss, nats per predicted token", log=True, zero=False, smooth=True),
    Chart("lr", "Learning rate", "rate"),
    Chart("grad_norm", "Gradient norm", log=True, zero=False, smooth=True),
    Chart("update_norm", "Norm of the update", log=True, zero=False, smooth=True),
    Chart("tokens_per_second", "Throughput, tokens per second", "count", smooth=True),
    Chart("mfu", "Model FLOP/s, share of the GPU's peak", "percent", smooth=True),
    Chart("rank_flops_per_second", "Model FLOP/s of the first rank's device", "count", smooth=True),
    Chart("data_wait_share", "Waiting for data, share of the step", "percent", smooth=True),
    Chart("peak_memory_bytes", "Memory at its peak", "bytes"),
    Chart("packing_efficiency", "Packing efficiency", "percent", zero=False, smooth=True),
    Chart("rows", "Batch size, rows", "count"),
)


class Known(NamedTuple):
    """The part of a run that a page already has: the choice of its steps, their number, the state of the rest."""

    choice: int = -1
    steps: int = 0
    revision: int = -1


class WatchedRun:
    """A run that is read as it grows.

    Args:
        folder: of the run.
        name: unique on the page.
        points: steps to draw.
        live: True if it may still grow; else it is read once, and a record that cannot be read is an error.
        newest: finds the newest valid checkpoint of a run that is not live.
    """

    def __init__(
        self, folder: Path, name: str, points: int = POINTS, *, live: bool = False, newest: Newest | None = None
    ) -> None:
        self.folder, self.name, self.points, self.live = folder, name, points, live
        self._newest = newest
        self._following = Following(folder / "metrics.jsonl")
        self._chosen = np.arange(0)
        self._read = 0  # steps of the history when the drawn ones were chosen
        self._dropped = -1
        self._thinned = False
        self._choice = self._revision = 0
        self._other_files: tuple[Any, ...] = ()
        self._about: dict[str, Any] = {}
        self._config: tuple[Any, dict[str, str]] | None = None

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read new lines; return True if there is more to read.

        Raises:
            DataError: the record of a run that is not live cannot be read.
        """
        try:
            changed, more = self._following.refresh(seconds)
        except DataError:
            if not self.live:
                raise
            changed, more = False, False  # not begun, or its disk is unavailable for a moment
        if not self.live:
            self._following.finish()
        other_files = (
            *(
                state_of(self.folder / name)
                for name in ("config.yaml", DATA, STARTS, "evaluations.jsonl", "samples.jsonl")
            ),
            in_use(self.folder) if self.live else None,
        )
        if changed or other_files != self._other_files or not self._about:
            self._other_files = other_files
            history = self._following.history
            self._choose(history)
            self._about = self._describe(history)
            self._revision += 1
        return more

    def changes(self, shown: Known = Known()) -> dict[str, Any] | None:  # noqa: B008
        """Return the part that a page does not have yet; None if it has everything."""
        have = Known(self._choice, len(self._chosen), self._revision)
        if have == shown:
            return None
        first = shown.steps if shown.choice == self._choice and shown.steps <= len(self._chosen) else 0
        return {"known": list(have), "first": first, **self._about, **self._columns(first)}

    def _choose(self, history: History) -> None:
        steps = history.steps
        new = len(steps) - self._read
        if steps.dropped != self._dropped or new < 0 or len(self._chosen) + new > _GROWS * self.points:
            self._chosen = thin(steps, self.points)
            self._thinned = len(self._chosen) < len(steps)
            self._choice += 1
        else:
            self._chosen = np.concatenate([self._chosen, np.arange(self._read, len(steps))])
        self._read, self._dropped = len(steps), steps.dropped

    def _columns(self, first: int) -> dict[str, Any]:
        steps, chosen = self._following.history.steps, self._chosen
        columns, smooth = {}, {}
        for name in ("step", "tokens", "seconds", *(chart.column for chart in CHARTS), *steps.terms):
            values = steps.column(name)
            if not np.isfinite(values).any():
                continue
            columns[name] = as_json(values[chosen][first:], 16 if name in _WHOLE else 7 if name == "seconds" else 6)
            if self._thinned and (name in _SMOOTHED or name in steps.terms):
                smooth[name] = as_json(means(values, chosen)[first:])
        return {"columns": columns, "means": smooth}

    def _describe(self, history: History) -> dict[str, Any]:
        config = self.folder / "config.yaml"
        text = ""
        with suppress(OSError):
            text = config.read_text("utf-8", "replace")[:_CONFIG]
        starts, data, figures_by_head = read_starts(self.folder), read_data(self.folder), figures(history)
        lines: list[dict[str, Any]] = []
        with suppress(OSError):
            lines, _ = read_lines(self.folder / STARTS)
        newest = self._newest(self.folder) if self._newest else None
        settings, steps = self._settings(config), history.steps
        total = _total_tokens(settings)
        done = bool(total and steps) and steps[-1].tokens >= total
        state = run_state(self.folder, starts, done=done, begun=bool(steps)) if self.live else ""
        return {
            "name": self.name,
            "state": state,
            "last": date(history.last_time),
            "total": len(history.steps),
            "tiles": [
                *(progress_tiles(history, total) if state == "training" else ()),
                *tiles(history, figures_by_head, spent_in(history, lines), newest),
            ],
            "figures": {
                head: [figure.value if math.isfinite(figure.value) else None, figure.text]
                for head, figure in figures_by_head.items()
            },
            "warnings": warnings(history),
            "tables": [each._asdict() for each in run_tables(history, read_results(self.folder), data, starts)],
            "config": text,
            "settings": settings,
            "phases": [
                [history.steps[phase.first].step - 1, phase.start, shorten(phase.name, _NAME)]
                for phase in history.phases()[-MAX_FIGURES:]
            ],
            "events": _events(history),
            "curves": _curves(history),
            "samples": read_samples(self.folder),
            "data": pictures(data),
        }

    def _settings(self, config: Path) -> dict[str, str]:
        if self._config is None or self._config[0] != state_of(config):  # reading YAML takes a while
            self._config = (state_of(config), _settings(config))
        return self._config[1]


def _curves(history: History) -> list[dict[str, Any]]:
    """Return a curve for each figure of validations and evaluations, with its baseline."""
    validations = history.validations
    lines = [
        ("Held-out loss, nats per predicted token", "number", True, "loss", "unigram_loss"),
        ("Held-out accuracy on predicted tokens", "percent", False, "accuracy", "unigram_accuracy"),
    ]
    curves = [
        _curve(title, form, log, validations, [getattr(v, key) for v in validations],
               [getattr(v, guess) for v in validations])
        for title, form, log, key, guess in lines
    ]  # fmt: skip
    for name in list(dict.fromkeys(name for v in validations for name in v.figures))[:MAX_FIGURES]:
        values = [v.figures.get(name, NAN) for v in validations]
        title = "Held-out loss, bits per byte" if name == BITS_PER_BYTE else f"Held out: {name}"
        curves.append(_curve(title, "number", False, validations, values, ()))
    for (name, figure), records in list(history.by_figure().items())[:MAX_FIGURES]:
        values = [record.figures[figure] for record in records]
        guesses = [record.figures.get(f"{BASELINE}{figure}", NAN) for record in records]
        curves.append(_curve(f"{name}: {figure}", "number", False, records, values, guesses))
    return curves if validations or history.evaluations else []


def _curve(
    title: str, form: str, log: bool, at: Sequence[Any], values: Sequence[float], guesses: Sequence[float]
) -> dict[str, Any]:
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    chosen = finite[:: -(-len(finite) // POINTS) or 1]
    columns = {
        "step": [at[i].step for i in chosen],
        "tokens": [at[i].tokens for i in chosen],
        "value": [values[i] for i in chosen],
        "guess": [guesses[i] for i in chosen] if any(map(math.isfinite, guesses)) else [],
    }
    lists = {name: as_json(np.array(column, dtype=np.float64), 16 if name in _WHOLE else 6)
             for name, column in columns.items()}  # fmt: skip
    return {"title": title, "form": form, "log": log, **lists}


def _events(history: History) -> list[list[Any]]:
    """Return [kind, step, tokens, text] of each restart and fault."""
    restarts = [
        ["restart", r.step, r.tokens, shorten(f"{r.what} {r.action_text}", _NAME)] for r in history.restarts[-_EVENTS:]
    ]
    faults = [
        ["fault", f.step, f.tokens, shorten(f"step {f.step:,}: {f.what}, {f.action_text}", _NAME)]
        for f in history.faults[-_EVENTS:]
    ]
    return restarts + faults


def _settings(file: Path) -> dict[str, str]:
    """Return every value of a configuration by its dotted key, unchecked: an older version may have written it."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in dotted(read_yaml(file, {}, [])).items()
    }
    return {shorten(key, _NAME): shorten(text, _LETTERS) for key, text in texts.items()}


def _total_tokens(settings: Mapping[str, str]) -> float:
    """Return the tokens of all phases, from the dotted keys of a configuration."""
    lengths = [text for key, text in settings.items() if re.fullmatch(r"phases\.[^.]+\.tokens", key)]
    return float(sum(int(text) for text in lengths if text.isdecimal()))


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the folders' names, or their whole paths if two names are the same."""
    names = [folder.resolve().name for folder in folders]
    return [
        shorten(name if names.count(name) == 1 else str(folder.resolve()), _NAME)
        for name, folder in zip(names, folders, strict=True)
    ]


def points_of(runs: int) -> int:
    """Return the number of steps to draw of each run, on a page of so many runs."""
    return min(POINTS, max(MIN_POINTS, ALL_POINTS // max(1, runs)))


def document(runs: Sequence[dict[str, Any]], *, title: str, points: int, live: bool = False) -> dict[str, Any]:
    """Return the data of a page.

    Args:
        runs: `WatchedRun.changes` of each.
        title: of the page.
        points: steps to draw of each run.
        live: True if the page polls for changes.
    """
    charts = [chart._asdict() for chart in CHARTS]
    return {"title": title, "points": points, "live": live, "charts": charts, "runs": list(runs)}


def read_runs(folders: Sequence[Path], newest: Newest | None = None) -> dict[str, Any]:
    """Return the document of runs in their present state.

    Args:
        folders: of the runs.
        newest: see `WatchedRun`.

    Raises:
        DataError: a folder lacks metrics.jsonl.
    """
    points = points_of(len(folders))
    runs = []
    for folder, name in zip(folders, names_of(folders), strict=True):
        run = WatchedRun(folder, name, points, newest=newest)
        run.refresh()
        changes = run.changes()
        assert changes is not None
        runs.append(changes)
    title = shorten(", ".join(each["name"] for each in runs), 100)
    return document(runs, title=title, points=points)
