"""Read the labelled texts of a task from files or from a dataset of the hub.

Unreadable rows are refused with their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import PACKED, anything_as, ending, os_errors_as, values_as
from modernbert_train.data.read.hub import class_names, is_saved, open_dataset
from modernbert_train.data.read.rows import Columns, Row
from modernbert_train.data.read.task_rows import TaskRow, task_rows
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.examples import TRAIN, Example, Split
from modernbert_train.evaluate.finetune.kinds import column_keys, kind_of

_ALIASES = {"validation": "dev", "validation_matched": "dev_matched", "validation_mismatched": "dev_mismatched"}


def files_of(task: TaskConfig) -> dict[str, Path]:
    """Return the local file of each split, by name; empty if they are on the hub.

    Raises:
        DataError: a folder lacks the file, or a file is of a kind that cannot be read.
    """
    if task.data is not None and (not Path(task.data).is_dir() or is_saved(task.data)):
        return {}
    return {name: file_of(name, split, task) for name, split in splits_of(task).items()}


def file_of(key: str, split: str, task: TaskConfig) -> Path:
    """Return the local file of a split, which `key` names. Raises DataError as `files_of`."""
    path = Path(split) if task.data is None else _in_folder(task, split)
    ends = kind_of(task.kind).ends
    if ending(path) not in ends:
        raise DataError(f"{key}={path}: unknown file type. For kind={task.kind} name one of {', '.join(ends)}.")
    if not path.is_file():
        wrong = "a folder, a pipe or a device, and not a file" if path.exists() else "no such file"
        raise DataError(f"{key}={path}: {wrong}. Correct the path.")
    return path


def splits_of(task: TaskConfig) -> dict[str, str]:
    """Return the file or split of each key that reads texts."""
    return {TRAIN: task.train, **task.validation, **task.predict}


def _in_folder(task: TaskConfig, split: str) -> Path:
    folder = Path(str(task.data))
    subset, _, split = split.rpartition("/")
    subset = subset or task.subset or ""
    if subset and (folder / subset).is_dir():
        folder /= subset
    ends = [end for end in kind_of(task.kind).ends if end != ".txt"]
    names = [f"{stem}{end}" for stem in (split, _ALIASES.get(split, split)) for end in ends]
    candidates = [folder / f"{name}{packed}" for name in names for packed in ("", *PACKED)]
    if (file := next(filter(Path.is_file, candidates), None)) is not None:
        return file
    raise DataError(f"{folder}: has none of {', '.join(dict.fromkeys(names))}. Put the split {split!r} there.")


def read_splits(task: TaskConfig) -> dict[str, Split]:
    """Return all splits of a task, the training one first.

    Raises:
        DataError: a file cannot be read, lacks a column or has a broken line; names it.
    """
    files = files_of(task)
    if files:
        return {name: read_file(name, path, task) for name, path in files.items()}
    return {name: _of_hub(name, split, task) for name, split in splits_of(task).items()}


def first_row(key: str, path: Path, task: TaskConfig) -> None:
    """Read the first row of a file. Raises DataError as `read_splits` does."""
    read_file(key, path, task, 1)


def _read_columns(key: str, task: TaskConfig) -> tuple[bool, str | None]:
    """Return whether labels of a split are read, and the column with its ids, if any."""
    return key not in task.predict, task.id_column if key != TRAIN else None


def read_file(key: str, path: Path, task: TaskConfig, max_rows: int | None = None, source: str | None = None) -> Split:
    """Read the rows of a file, `max_rows` at most; `source` names it in messages. Raises DataError as `read_splits`."""
    unread = os_errors_as(DataError, f"{key}={path}: cannot be read", "Name a file of labelled texts.")
    with unread, values_as(DataError, f"{key}={path}"):
        rows = kind_of(task.kind).rows(path, task, *_read_columns(key, task))
        return _split(key, source or str(path), "line", itertools.islice(rows, max_rows), task, ())


def _of_hub(key: str, split: str, task: TaskConfig) -> Split:
    labelled, named = _read_columns(key, task)
    subset, _, split = split.rpartition("/")
    subset = subset or task.subset or ""
    remedy = f"Correct data, subset and the split {split!r}, or name a folder with a file for each split: data=FOLDER."
    with anything_as(DataError, f"data={task.data}: the hub does not give it", remedy):
        dataset = open_dataset(str(task.data), subset or None, split, streaming=False)
    texts, others = kind_of(task.kind).columns(task, labelled)
    names = class_names(dataset, others[-1]) if labelled and others[-1] in dataset.column_names else ()
    others = [*others, *([named] if named else [])]
    source = "/".join(filter(None, (task.data, subset, split)))
    with values_as(DataError, source):
        if problem := Columns((*texts, *others)).lacking(dataset.column_names):
            raise ValueError(f"{problem}. Set {column_keys(named)} to names of them.")
        rows = (Row(source, row, line=number) for number, row in enumerate(dataset, start=1))
        return _split(key, source, "row", task_rows(rows, texts, others, word="row"), task, names)


def _split(
    key: str, source: str, word: str, rows: Iterable[TaskRow], task: TaskConfig, names: tuple[str, ...]
) -> Split:
    labelled, named = _read_columns(key, task)
    kind, examples = kind_of(task.kind), []
    for row in rows:
        values = list(row.values)
        name = values.pop() if named is not None else None
        label = values.pop() if labelled else None
        example = Example(f"{source}: {word} {row.line}", row.texts, label, row.line, name)
        examples.append(kind.example(example, tuple(values), task, names, labelled))
    return Split(key, source, examples, names, labelled=labelled)
