"""Labelled texts out of a file: which are taken, which class each has, and which part of them tells about it.

Read without torch, so that `check` refuses what `train` would; keyed, so that every start takes the same.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import ProbeConfig, RunConfig
from modernbert_train.errors import DataError
from modernbert_train.keyed_random import derive, permutation
from modernbert_train.read_json import MOST_BYTES, parse_json
from modernbert_train.text import plural, shorten

ONLY_LEARNED = -1  # a text that nothing is told about
_DRAWN, _FOLDS = 1, 2
_SHOWN = 10  # columns and classes named in a message
_NO_CLASS = ("", "nan", "null", "none")  # what programs write into a table where a value is missing


class Example(NamedTuple):
    """A text, in one part or several, and its class."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Labelled:
    """What a probe learns from and is told.

    Attributes:
        texts: those of the first file, then those of the second.
        classes: names, sorted.
        labels_N: int64 number of each text's class.
        parts_N: int64. The texts of part 0, 1, ... are told by a classifier that has learned from all others.
        empty: texts without a letter, which were left out.
    """

    texts: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...]
    labels_N: NDArray[np.int64]
    parts_N: NDArray[np.int64]
    empty: int

    def __str__(self) -> str:
        learned = int((self.parts_N == ONLY_LEARNED).sum())
        split = f", {len(self.texts) - learned:,} of them to be told" if learned else ""
        left_out = f"; {plural(self.empty, 'empty text')} left out" if self.empty else ""
        return f"{len(self.texts):,} texts of {len(self.classes):,} classes{split}{left_out}"


def read_labelled(key: str, settings: ProbeConfig) -> Labelled:
    """The texts of a probe, drawn and divided into parts.

    Args:
        key: of the configuration, evals.NAME, for messages.
        settings: what stands there.

    Raises:
        DataError: a file is missing, damaged or lacks a column, or its classes cannot be learned from it.
    """
    train, empty = _drawn(f"{key}.train", settings.train, settings)
    counts = Counter(example.label for example in train)
    if len(counts) < 2:
        raise DataError(
            f"{key}.train={settings.train}: {plural(len(train), 'text')}, all of one class "
            f"({', '.join(counts) or 'none'}). Give texts of at least two, or another {key}.label_column than "
            f"{settings.label_column}."
        )
    classes = tuple(sorted(counts))
    examples, parts_N = train, np.full(len(train), ONLY_LEARNED)
    if settings.test is None:
        if single := [label for label in classes if counts[label] < 2]:
            raise DataError(
                f"{key}.train={settings.train}: {len(single):,} of {len(classes):,} classes have a single text among "
                f"the {len(train):,} taken ({_some(single)}), which cannot be both learned and told. Raise "
                f"{key}.max_examples, give more texts, or name others in {key}.test."
            )
        order = permutation(len(train), derive(settings.seed, _FOLDS))
        dealt = sorted(range(len(train)), key=lambda number: (train[number].label, order[number]))
        parts_N[dealt] = np.arange(len(train)) % settings.folds  # of each class every fold gets as many, give or take
    else:
        test, empty_of_test = _drawn(f"{key}.test", settings.test, settings)
        unseen = sorted({example.label for example in test} - set(classes))
        if unseen:
            raise DataError(
                f"{key}.test={settings.test}: has classes ({_some(unseen)}) that none of the {len(train):,} texts "
                f"taken from {key}.train={settings.train} has. Raise {key}.max_examples, or remove those texts."
            )
        if len({example.label for example in test}) < 2:
            raise DataError(
                f"{key}.test={settings.test}: {plural(len(test), 'text')}, all of one class "
                f"({', '.join({example.label for example in test}) or 'none'}). Give texts of at least two."
            )
        examples, empty = [*train, *test], empty + empty_of_test
        parts_N = np.concatenate([parts_N, np.zeros(len(test), dtype=np.int64)])
    numbers = {label: number for number, label in enumerate(classes)}
    labels_N = np.array([numbers[example.label] for example in examples], dtype=np.int64)
    return Labelled(tuple(example.texts for example in examples), classes, labels_N, parts_N, empty)


def describe_labelled(config: RunConfig) -> list[str]:
    """A line for each probe of a run. Raises as `read_labelled`."""
    return [
        f"evals.{name}: {read_labelled(f'evals.{name}', settings)}"
        for name, settings in config.evals.items()
        if isinstance(settings, ProbeConfig)
    ]


def _drawn(key: str, file: str, settings: ProbeConfig) -> tuple[list[Example], int]:
    """Some of a file's texts in their order, and how many were empty."""
    path = Path(file)
    found, empty = [], 0
    try:
        for example in _READERS[path.suffix](path, (*settings.text_columns, settings.label_column)):
            if any(text.strip() for text in example.texts):
                found.append(example)
            else:
                empty += 1
    except OSError as error:
        raise DataError(f"{key}={file}: cannot be read ({error.strerror}). Name a file of labelled texts.") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{key}={file}: {error}") from None
    if settings.max_examples is not None and len(found) > settings.max_examples:
        order = permutation(len(found), derive(settings.seed, _DRAWN))
        found = [found[number] for number in np.sort(order[: settings.max_examples])]
    return found, empty


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[Example]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error}). Correct it, or remove it.") from None
        if not isinstance(entry, dict):
            raise ValueError(f"line {number} is no object. Write one a line, such as {{{_shown(columns)}}}.")
        _require_columns(columns, list(entry), f"line {number}")
        texts = [entry[column] for column in columns]
        for column, value in zip(columns[:-1], texts[:-1], strict=True):
            if not isinstance(value, str):
                raise ValueError(f"line {number}: {column} is {_value(value)}, and not a text. Correct it.")
        yield Example(tuple(texts[:-1]), _label(texts[-1], columns[-1], number))


def _table(path: Path, columns: Sequence[str]) -> Iterator[Example]:
    lines = _lines(path)
    if path.suffix == ".tsv":
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(lines, strict=True)
    head = next(rows, [])
    _require_columns(columns, head, "the first line")
    places = [head.index(column) for column in columns]
    for row in rows:
        if not row:
            continue
        if len(row) != len(head):
            raise ValueError(
                f"line {rows.line_num} has {plural(len(row), 'value')}, and the first line names {len(head)}. "
                f"Correct it; a .csv quotes texts that hold a comma or a line break, a .tsv holds no tabs in texts."
            )
        *texts, label = (row[place] for place in places)
        yield Example(tuple(texts), _label(label, columns[-1], rows.line_num))


# by the end of a file's name
_READERS = {".jsonl": _jsonl, ".tsv": _table, ".csv": _table}


def _lines(path: Path) -> Iterator[str]:
    size = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            for line in iter(lambda: file.readline(MOST_BYTES), ""):
                size += len(line)
                if size >= MOST_BYTES:
                    raise ValueError(f"larger than {MOST_BYTES:,} characters. Give a part of it.")
                yield line
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8. Convert it.") from None


def _require_columns(columns: Sequence[str], there: Sequence[str], where: str) -> None:
    if missing := [column for column in columns if column not in there]:
        raise ValueError(
            f"{where} has no {' and no '.join(missing)}; it has {_some(there) or 'nothing'}. Set text_columns and "
            "label_column to names of them."
        )


def _label(value: Any, column: str, line: int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int) and str(value).strip().lower() not in _NO_CLASS:
        return str(value).strip()
    raise ValueError(
        f"line {line}: {column} is {_value(value)}, and not a class: a text, a whole number, or true or false. Correct "
        "it, or leave the text out."
    )


def _value(value: Any) -> str:
    return shorten(repr(value), 40) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(shorten(str(name), 40) for name in names[:_SHOWN]) + more


def _shown(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}": "..."' for column in columns)
