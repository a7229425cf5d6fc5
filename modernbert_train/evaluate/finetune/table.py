"""Many results as one table: out of the result.json of each run in a folder, and out of nothing else.

A row is a model, a column what a task measures of a split; a cell is the mean over seeds, their standard deviation
(that of a sample, by n - 1) and their number. The average over tasks is taken seed by seed, of each task its first
metric, of several splits their mean; it is there when every task has the same seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modernbert_train.config.evals import METRICS_OF
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.read_json import number, read_json
from modernbert_train.core.text import markdown_table
from modernbert_train.errors import StorageError
from modernbert_train.evaluate.finetune.result import RESULT
from modernbert_train.evaluate.finetune.task import labels_of
from modernbert_train.report.many import TABLE

MARKDOWN = "table.md"
Table = dict[str, Any]


def read_result(file: Path) -> dict[str, Any] | None:
    """What a run came to; None where it has not, or where the file is none of ours."""
    try:
        found = read_json(file)
    except (OSError, ValueError):
        return None
    kinds: dict[str, type | tuple[type, ...]] = {"task": str, "source": str, "seed": (int, type(None))}
    kinds |= {"figures": dict, "settings": dict}
    whole = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    return found if whole else None


def make_table(folder: Path, models: Sequence[str] = (), tasks: Sequence[str] = ()) -> Table:
    """The table of all results in a folder.

    Args:
        folder: with a folder for each run.
        models, tasks: those whose rows and columns come first, as they were named.
    """
    results = [found for file in sorted(folder.glob(f"*/{RESULT}")) if (found := read_result(file)) is not None]
    named = list(dict.fromkeys([*models, *(each["source"] for each in results)]))
    labels = labels_of(named)
    first = [Path(task).stem for task in tasks]
    columns = list(dict.fromkeys(column for each in results for column in _columns(each)))
    columns.sort(key=lambda column: first.index(column[0]) if column[0] in first else len(first))
    rows = []
    for model in named:
        own = [each for each in results if each["source"] == model]
        cells = [spread(_values(own, *column)) for column in columns]
        rows.append({"model": labels[model], "source": model, "cells": cells, "average": _average(own, columns)})
    return {
        "columns": [{"task": task, "split": split, "metric": metric} for task, split, metric in columns],
        "rows": rows,
        "notes": list(_notes(results)),
    }


def _columns(result: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    settings = result["settings"]
    for metric in settings.get("metrics") or METRICS_OF[settings["kind"]][:1]:
        for split in settings["validation"]:
            yield result["task"], split, metric


def _values(results: Iterable[Mapping[str, Any]], task: str, split: str, metric: str) -> dict[str, float]:
    """Seed -> what was measured; a figure that is no number is left out."""
    found = {}
    for each in results:
        value = number(each["figures"].get(split, {}).get(metric)) if each["task"] == task else None
        if value is not None and math.isfinite(value):
            found[str(each["seed"])] = value
    return found


def spread(values: Mapping[str, float]) -> dict[str, Any] | None:
    """Mean and standard deviation over seeds, and the values; None where there is none."""
    if not values:
        return None
    deviation = statistics.stdev(values.values()) if len(values) > 1 else None
    mean = statistics.fmean(values.values())
    return {"mean": mean, "standard_deviation": deviation, "n": len(values), "seeds": dict(values)}


def _average(results: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> dict[str, Any] | None:
    tasks = list(dict.fromkeys(task for task, _, _ in columns))
    if len(tasks) < 2:
        return None
    of_tasks = []
    for task in tasks:
        metric = next(metric for each, _, metric in columns if each == task)
        of_splits = [_values(results, *column) for column in columns if (column[0], column[2]) == (task, metric)]
        if any(found.keys() != of_splits[0].keys() for found in of_splits):
            return None
        of_tasks.append({seed: statistics.fmean(found[seed] for found in of_splits) for seed in of_splits[0]})
    if any(found.keys() != of_tasks[0].keys() for found in of_tasks):
        return None
    return spread({seed: statistics.fmean(found[seed] for found in of_tasks) for seed in of_tasks[0]})


def _notes(results: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """What a reader must know before rows are compared: that they were not all made alike."""
    for task in dict.fromkeys(each["task"] for each in results):
        wanted = [each.get("asked") or {} for each in results if each["task"] == task]
        keys = [{**_flat(each.get("task") or {}), **_flat(each.get("keys") or {})} for each in wanted]
        if other := sorted(key for key in set[str]().union(*keys) if len({each.get(key) for each in keys}) > 1):
            yield f"{task}: the runs differ in {', '.join(other)}; their result.json say how."


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": json.dumps(value)}
    return found


def write_table(folder: Path, table: Table) -> None:
    """Write the table as JSON and as Markdown.

    Raises:
        StorageError: the disk refuses it.
    """
    with os_errors_as(
        StorageError,
        f"{folder}: cannot be written",
        "Free some space or fix the permissions; the same command resumes.",
    ):
        write_whole(folder / TABLE, json.dumps(table, indent=2) + "\n")
        write_whole(folder / MARKDOWN, as_markdown(table) + "\n")


def as_markdown(table: Table) -> str:
    """The first metric of each task, and the average; all others are in table.json."""
    shown = shown_columns(table)
    average = ["average"] * any(row["average"] is not None for row in table["rows"])
    head = ["model", *(heading(table["columns"], index) for index in shown), *average]
    rows = [
        [
            row["model"],
            *(as_text(row["cells"][index]) for index in shown),
            *([as_text(row["average"])] if average else []),
        ]
        for row in table["rows"]
    ]
    lines = [markdown_table(head, rows), "", "Mean ± standard deviation over seeds (their number)."]
    return "\n".join([*lines, *(f"Note: {note}" for note in table["notes"])])


def shown_columns(table: Table) -> list[int]:
    """Those of the first metric of each task."""
    first: dict[str, str] = {}
    for column in table["columns"]:
        first.setdefault(column["task"], column["metric"])
    return [index for index, column in enumerate(table["columns"]) if first[column["task"]] == column["metric"]]


def heading(columns: Sequence[Mapping[str, str]], index: int) -> str:
    """Task and metric; the split too, where there are several."""
    own = columns[index]
    several = len({column["split"] for column in columns if column["task"] == own["task"]}) > 1
    return f"{own['task']} {own['metric']}" + (f", {own['split']}" if several else "")


def as_text(cell: Mapping[str, Any] | None) -> str:
    """Such as 0.9123 ± 0.0045 (4); a minus where nothing was measured."""
    if cell is None:
        return "-"
    deviation = cell["standard_deviation"]
    return f"{cell['mean']:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}") + f" ({cell['n']})"
