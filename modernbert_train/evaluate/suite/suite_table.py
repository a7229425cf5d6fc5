"""Make the table of a suite: models as rows, tasks as columns, published rows below; each cell lists its runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.text import plural
from modernbert_train.errors import StorageError
from modernbert_train.evaluate.suite.cells import Failure
from modernbert_train.evaluate.suite.efficiency import not_measured, table_of
from modernbert_train.evaluate.suite.formats import Table, as_csv, as_latex, as_markdown
from modernbert_train.evaluate.suite.plan import Plan, choices_of
from modernbert_train.report.dot_plot import draw_dot_plot

TABLE, PICTURE = "table.json", "table.svg"
FORMS = {"table.md": as_markdown, "table.csv": as_csv, "table.tex": as_latex}


def make_table(plan: Plan, failures: Mapping[str, Failure], left_out: Sequence[str] = ()) -> Table:
    """Return the current table.

    Args:
        plan: the runs, with those that failed.
        failures: other failures, by their name in messages.
        left_out: notes about adapters that were not gathered.
    """
    suite = plan.suite
    columns = [
        {"task": name, "split": task.split or "", "metric": plan.metric(name)} for name, task in suite.tasks.items()
    ]
    columns += [{"task": name, "split": "", "metric": "mean"} for name in suite.groups]
    rows = [_row(plan, model) for model in plan.models]
    for model, each in suite.published.items():
        cells = [_published(each.figures.get(column["task"])) for column in columns]
        name = f"{model} (published)"
        rows.append({"model": name, "source": each.source, "published": True, "cells": cells, "average": None})
    speed, notes = [], [*_notes(plan, rows), *(f"{name}: {failure}" for name, failure in failures.items()), *left_out]
    if suite.efficiency is not None:
        speed = table_of(plan)
        notes += not_measured(plan)
    return {"columns": columns, "rows": rows, "efficiency": speed, "notes": notes}


def _row(plan: Plan, model: str) -> dict[str, Any]:
    cells = {name: _cell(plan, name, model) for name in plan.suite.tasks}
    means = {name: cell["mean"] for name, cell in cells.items()}
    groups = [_mean([means[member] for member in members]) for members in plan.suite.groups.values()]
    average = _mean(list(means.values())) if len(means) > 1 else None
    return {"model": plan.labels[model], "source": model, "cells": [*cells.values(), *groups], "average": average}


def _cell(plan: Plan, name: str, model: str) -> dict[str, Any]:
    """Return mean, deviation and values by seed of the chosen values, all runs, and the reasons of missing figures."""
    task, chosen = plan.suite.tasks[name], plan.chosen(name, model)
    runs, values, problems = [], dict[str, float](), dict[str, list[str]]()
    for choice in plan.choices(name, model):
        for seed in plan.seeds_of(name):
            value, problem, cell = plan.standing(name, model, choice, seed, task.split)
            if value is not None or problem is not None:
                run = {"run": None if cell is None else cell.name, "choice": str(choice), "seed": seed, "value": value}
                runs.append(run if problem is None else run | {"problem": problem})
            if problem is not None:
                words = [*filter(None, [str(choice)]), *([] if seed is None else [f"seed {seed}"])]
                problems.setdefault(problem, []).append(" ".join(words))
            if choice == chosen and value is not None:
                values[str(seed)] = value
    return {
        "mean": statistics.fmean(values.values()) if values else None,
        "standard_deviation": statistics.stdev(values.values()) if len(values) > 1 else None,
        "n": len(values),
        "of": len(plan.seeds_of(name)),
        "seeds": values,
        "chosen": None if chosen is None else str(chosen),
        "runs": runs,
        "unfit": plan.unfit(name, model) is not None,
        "failed": [f"{', '.join(own)}: {problem}".removeprefix(": ") for problem, own in problems.items()],
    }


def _mean(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return the mean over several tasks; None if one is missing."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return None
    return {"mean": sum(numbers) / len(numbers), "standard_deviation": None, "n": len(numbers), "seeds": {}}


def _published(percent: float | None) -> dict[str, Any] | None:
    return None if percent is None else {"mean": percent / 100, "standard_deviation": None, "n": 0, "seeds": {}}


def _notes(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row.get("published"):
            yield f"{row['model']}: {row['source']}. Not run here."
            continue
        for name, cell in zip(plan.suite.tasks, row["cells"], strict=False):
            task, choices = plan.suite.tasks[name], plan.choices(name, row["source"])
            if num_ignored := len(choices_of(task)) - len(choices):
                left_out = plural(num_ignored, "choice")
                yield f"{name} of {row['model']}: {left_out} not run, since this model ignores the keys."
            if cell["chosen"] and (len(choices) > 1 or not num_ignored):
                by = len(plan.choosing_seeds(name))
                on = f" on {split}" if (split := task.choose_on or task.split) else ""
                some = f" with {by} of {plural(len(plan.seeds_of(name)), 'seed')}"
                yield f"{name} of {row['model']}: {cell['chosen']}, the best of {len(choices)}{on}{some}."
            yield from (f"{name} of {row['model']}: {problem}" for problem in cell["failed"])


def write_suite(out: Path, table: Table) -> None:
    """Write table.json, and from it the table as Markdown, CSV, LaTeX and a picture.

    Raises:
        StorageError: the disk refuses it.
    """
    with os_errors_as(StorageError, f"{out}: cannot be written", "Free some space; the same command resumes."):
        write_whole(out / TABLE, json.dumps(table, indent=2) + "\n")
        for name, form in FORMS.items():
            write_whole(out / name, form(table))
        write_whole(out / PICTURE, draw_dot_plot(table["columns"], table["rows"]))
