"""Runs -> what their page draws: of each run columns of numbers, tables of text, its configuration and its samples.

The page is the same for one run and for a hundred, drawn into a file or served while they train. A run is read as far
as it has grown, and what is handed out of one that the page knows already is only what is new.
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

from modernbert_train.checkpoints.provenance import STARTS, Start, read_starts
from modernbert_train.checkpoints.results import read_results
from modernbert_train.config.evals import BASELINE, BITS_PER_BYTE
from modernbert_train.config.read import read_yaml
from modernbert_train.core.read_json import read_lines
from modernbert_train.core.text import date, shorten
from modernbert_train.data.statistics import DATA
from modernbert_train.errors import DataError
from modernbert_train.report.curves import Following, History, state_of
from modernbert_train.report.data import pictures, read_data, source_table
from modernbert_train.report.effective import Spent
from modernbert_train.report.evaluations import MOST, by_figure, evaluation_table
from modernbert_train.report.events import event_table, what_happened, what_was_done
from modernbert_train.report.listing import in_use
from modernbert_train.report.samples import read_samples
from modernbert_train.report.steps import NAN, ROUGH, as_json, means, thin
from modernbert_train.report.summary import Newest, figures, phase_table, progress_tiles, spent_in, tiles, warnings
from modernbert_train.report.trained_by import result_table, start_table

POINTS = 2_000  # drawn of the steps of a run, up to a few more while it grows
ALL_POINTS = 200_000  # of all runs of a page
FEWEST = 200  # of a run, however many there are
_EVENTS = 500  # marks of a run: the last ones
_GROWS = 1.25  # how many more steps than POINTS are drawn before they are chosen anew
_SMOOTHED = (*ROUGH, "mfu", "rank_flops_per_second", "packing_efficiency")
_WHOLE = ("step", "tokens")
_CONFIG = 100_000  # letters of a configuration
_LETTERS = 2_000  # of a value in it
_NAME = 200  # letters of a name


class Chart(NamedTuple):
    """What the steps of runs are drawn as.

    Attributes:
        column: of the steps.
        title: of the chart.
        form: of its values: number, rate, percent, count, bytes.
        log: whether the axis is logarithmic until a reader wants otherwise.
        zero: whether the axis begins at 0.
        smooth: whether a reader may smooth it.
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
    """What a page has of a run: which choice of its steps, how many of them, and the state of all else."""

    choice: int = -1
    steps: int = 0
    revision: int = -1


class WatchedRun:
    """A run that is read as it grows.

    Args:
        folder: of the run.
        name: that tells it from the others.
        points: of its steps that are drawn.
        live: whether it may grow yet; else it is read once, and a record that cannot be read is an error.
        newest: looks for the newest checkpoint that is valid, of a run that is not live.
    """

    def __init__(
        self, folder: Path, name: str, points: int = POINTS, *, live: bool = False, newest: Newest | None = None
    ) -> None:
        self.folder, self.name, self.points, self.live = folder, name, points, live
        self._newest = newest
        self._following = Following(folder / "metrics.jsonl")
        self._chosen = np.arange(0)
        self._read = 0  # steps of the history that were chosen from
        self._dropped = -1
        self._thinned = False
        self._choice = self._revision = 0
        self._beside: tuple[Any, ...] = ()
        self._about: dict[str, Any] = {}
        self._config: tuple[Any, dict[str, str]] | None = None

    def refresh(self, seconds: float = math.inf) -> bool:
        """Read what has come; returns whether there is more.

        Raises:
            DataError: of a run that is not live, there is no record.
        """
        try:
            changed, more = self._following.refresh(seconds)
        except DataError:
            if not self.live:
                raise
            changed, more = False, False  # not begun, or its disk is away for a moment
        if not self.live:
            self._following.finish()
        beside = (
            *(
                state_of(self.folder / name)
                for name in ("config.yaml", DATA, STARTS, "evaluations.jsonl", "samples.jsonl")
            ),
            in_use(self.folder) if self.live else None,
        )
        if changed or beside != self._beside or not self._about:
            self._beside = beside
            history = self._following.history
            self._choose(history)
            self._about = self._describe(history)
            self._revision += 1
        return more

    def changes(self, known: Known = Known()) -> dict[str, Any] | None:  # noqa: B008
        """What a page does not have yet; None where it has all."""
        have = Known(self._choice, len(self._chosen), self._revision)
        if have == known:
            return None
        first = known.steps if known.choice == self._choice and known.steps <= len(self._chosen) else 0
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
        starts, data = read_starts(self.folder), read_data(self.folder)
        tables = [
            phase_table(history),
            evaluation_table(history),
            result_table(read_results(self.folder)),
            event_table(history),
            source_table(data),
            start_table(starts, history.last_time),
        ]
        state, settings = self._state(starts) if self.live else "", self._settings(config)
        phases = history.phases()
        first_steps = [history.steps[phase.first].step - 1 for phase in phases[-MOST:]]
        return {
            "name": self.name,
            "state": state,
            "last": date(history.last_time),
            "total": len(history.steps),
            "tiles": [
                *(progress_tiles(history, _total_tokens(settings)) if state == "training" else ()),
                *tiles(history, self._spent(history), self._newest(self.folder) if self._newest else None),
            ],
            "figures": {head: [_plain(figure.value), figure.text] for head, figure in figures(history).items()},
            "warnings": warnings(history),
            "tables": [table._asdict() for table in tables if table is not None],
            "config": text,
            "settings": settings,
            "phases": [
                [step, phase.start, shorten(phase.name, _NAME)]
                for step, phase in zip(first_steps, phases[-MOST:], strict=True)
            ],
            "events": _events(history),
            "curves": _curves(history),
            "samples": read_samples(self.folder),
            "data": pictures(data),
        }

    def _spent(self, history: History) -> Spent:
        lines: list[dict[str, Any]] = []
        with suppress(OSError):
            lines, _ = read_lines(self.folder / STARTS)
        return spent_in(history, lines)

    def _settings(self, config: Path) -> dict[str, str]:
        if self._config is None or self._config[0] != state_of(config):  # reading YAML takes a while
            self._config = (state_of(config), _settings(config))
        return self._config[1]

    def _state(self, starts: Sequence[Start]) -> str:
        if in_use(self.folder):
            return "training"
        return (starts[-1].outcome or "interrupted") if starts else ""


def _curves(history: History) -> list[dict[str, Any]]:
    """Of what is measured now and then: each figure a curve, with what guessing reaches."""
    validations = history.validations
    found = [
        ("Held-out loss, nats per predicted token", "number", True, "loss", "unigram_loss"),
        ("Held-out accuracy on predicted tokens", "percent", False, "accuracy", "unigram_accuracy"),
    ]
    curves = [
        _curve(title, form, log, validations, [getattr(v, key) for v in validations],
               [getattr(v, guess) for v in validations])
        for title, form, log, key, guess in found
    ]  # fmt: skip
    for name in list(dict.fromkeys(name for v in validations for name in v.figures))[:MOST]:
        values = [v.figures.get(name, NAN) for v in validations]
        title = "Held-out loss, bits per byte" if name == BITS_PER_BYTE else f"Held out: {name}"
        curves.append(_curve(title, "number", False, validations, values, ()))
    for (name, figure), records in list(by_figure(history).items())[:MOST]:
        values = [record.figures[figure] for record in records]
        guesses = [record.figures.get(f"{BASELINE}{figure}", NAN) for record in records]
        curves.append(_curve(f"{name}: {figure}", "number", False, records, values, guesses))
    return curves if validations or history.evaluations else []


def _curve(
    title: str, form: str, log: bool, at: Sequence[Any], values: Sequence[float], guesses: Sequence[float]
) -> dict[str, Any]:
    known = [i for i, value in enumerate(values) if math.isfinite(value)]
    chosen = known[:: -(-len(known) // POINTS) or 1]
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
    """[kind, step, tokens, what]."""
    restarts = [["restart", r.step, r.tokens, f"restart from {r.checkpoint or 'scratch'}"] for r in history.restarts]
    faults = [
        ["fault", f.step, f.tokens, f"step {f.step:,}: {what_happened(f)}, {what_was_done(f)}"] for f in history.faults
    ]
    return [
        [kind, step, tokens, shorten(str(what), _NAME)]
        for kind, step, tokens, what in restarts[-_EVENTS:] + faults[-_EVENTS:]
    ]


def _settings(file: Path) -> dict[str, str]:
    """Every value of a configuration by its dotted key. It is not checked: an older version may have written it."""
    found: dict[str, str] = {}

    def walk(tree: Mapping[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping) and value:
                walk(value, f"{path}{key}.")
            else:
                text = value if isinstance(value, str) else json.dumps(value, default=str)
                found[shorten(f"{path}{key}", _NAME)] = shorten(text, _LETTERS)

    walk(read_yaml(file, {}, []), "")
    return found


def _total_tokens(settings: Mapping[str, str]) -> float:
    """Tokens of all phases, by the dotted keys of a configuration."""
    lengths = [text for key, text in settings.items() if re.fullmatch(r"phases\.[^.]+\.tokens", key)]
    return float(sum(int(text) for text in lengths if text.isdecimal()))


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def names_of(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two are the same."""
    names = [folder.resolve().name for folder in folders]
    return [
        shorten(name if names.count(name) == 1 else str(folder.resolve()), _NAME)
        for name, folder in zip(names, folders, strict=True)
    ]


def points_of(runs: int) -> int:
    """Of the steps of each of so many runs that are drawn."""
    return min(POINTS, max(FEWEST, ALL_POINTS // max(1, runs)))


def document(runs: Sequence[dict[str, Any]], *, title: str, points: int, live: bool = False) -> dict[str, Any]:
    """What a page is made of.

    Args:
        runs: `WatchedRun.changes` of each.
        title: of the page.
        points: drawn of the steps of a run.
        live: whether the page asks for more.
    """
    charts = [chart._asdict() for chart in CHARTS]
    return {"title": title, "points": points, "live": live, "charts": charts, "runs": list(runs)}


def read_runs(folders: Sequence[Path], newest: Newest | None = None) -> dict[str, Any]:
    """The document of runs as they are now.

    Args:
        folders: of the runs.
        newest: see `WatchedRun`.

    Raises:
        DataError: a folder has no metrics.jsonl.
    """
    points = points_of(len(folders))
    found = []
    for folder, name in zip(folders, names_of(folders), strict=True):
        run = WatchedRun(folder, name, points, newest=newest)
        run.refresh()
        changes = run.changes()
        assert changes is not None
        found.append(changes)
    title = shorten(", ".join(each["name"] for each in found), 100)
    return document(found, title=title, points=points)
