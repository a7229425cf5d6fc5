"""Read labelled texts from a file: choose texts, find their classes, and divide them into folds.

Works without torch, so `check` reports the same errors as `train`; keyed, so every start chooses the same texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.evals import of_kind
from modernbert_train.config.schema import EvaluatorConfig, ProbeConfig
from modernbert_train.core.files import values_as
from modernbert_train.core.keyed_random import derive, permutation
from modernbert_train.core.text import plural, shorten, shown_value, some
from modernbert_train.data.read.task_rows import Cell, table_rows
from modernbert_train.errors import DataError

ONLY_LEARNED = -1  # part of a text that is used for training only
_DRAWN, _FOLDS = 1, 2
_NO_CLASS = ("nan", "null", "none")  # written into tables by programs for a missing value


class Example(NamedTuple):
    """A text, in one part or several, and its class."""

    texts: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Labelled:
    """Texts and classes of a probe.

    Attributes:
        texts: from the first file, then from the second.
        classes: names, sorted.
        labels_N: int64 index of each text's class.
        parts_N: int64. The texts of part 0, 1, ... are classified by a model trained on all others.
        empty: number of texts without a letter, which were left out.
    """

    texts: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...]
    labels_N: NDArray[np.int64]
    parts_N: NDArray[np.int64]
    empty: int

    def __str__(self) -> str:
        learned = int((self.parts_N == ONLY_LEARNED).sum())
        split = f", {len(self.texts) - learned:,} of them to be classified" if learned else ""
        left_out = f"; {plural(self.empty, 'empty text')} left out" if self.empty else ""
        return f"{len(self.texts):,} texts of {len(self.classes):,} classes{split}{left_out}"


def read_labelled(key: str, settings: ProbeConfig) -> Labelled:
    """Read the texts of a probe, and choose and divide them.

    Args:
        key: key in the configuration, evals.NAME, for messages.
        settings: its section.

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
                f"the {len(train):,} taken ({some(single)}), which cannot be used for both training and testing. Raise "
                f"{key}.max_examples, give more texts, or name others in {key}.test."
            )
        order = permutation(len(train), derive(settings.seed, _FOLDS))
        dealt = sorted(range(len(train)), key=lambda number: (train[number].label, order[number]))
        parts_N[dealt] = np.arange(len(train)) % settings.folds  # folds get about equally many texts of each class
    else:
        test, empty_of_test = _drawn(f"{key}.test", settings.test, settings)
        unseen = sorted({example.label for example in test} - set(classes))
        if unseen:
            raise DataError(
                f"{key}.test={settings.test}: has classes ({some(unseen)}) that none of the {len(train):,} texts "
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


def describe_labelled(evals: Mapping[str, EvaluatorConfig]) -> list[str]:
    """Return a line for each probe of a run. Raises as `read_labelled`."""
    return [
        f"evals.{name}: {read_labelled(f'evals.{name}', settings)}"
        for name, settings in of_kind(evals, ProbeConfig).items()
    ]


def _drawn(key: str, file: str, settings: ProbeConfig) -> tuple[list[Example], int]:
    """Choose texts of a file, in their order, and count the empty ones."""
    path = Path(file)
    found, empty = [], 0
    with values_as(DataError, f"{key}={file}"):
        for row in table_rows(path, settings.text_columns, (settings.label_column,)):
            if any(text.strip() for text in row.texts):
                found.append(Example(row.texts, _label(row.values[0], settings.label_column, row.line)))
            else:
                empty += 1
    if settings.max_examples is not None and len(found) > settings.max_examples:
        order = permutation(len(found), derive(settings.seed, _DRAWN))
        found = [found[number] for number in np.sort(order[: settings.max_examples])]
    return found, empty


def class_name(value: Any, column: str, known: Collection[str] = ()) -> str:
    """Return the class that a value of a column names; in a .csv `nan` and `none` do only if they are `known`.

    Raises:
        ValueError: it is not a class.
    """
    if isinstance(value, bool):
        return str(value).lower()
    name = str(value).strip() if isinstance(value, str | int) else ""
    missing = isinstance(value, Cell) and name.lower() in _NO_CLASS and name not in known
    if name and not missing:
        return name
    raise ValueError(
        f"{column} is {shown_value(value)}, and not a class: a text, a whole number, or true or false. Correct it, or "
        "leave the text out." + " If it is a class, name all classes in labels, or write .jsonl." * missing
    )


def listed_classes(value: Any, column: str, separator: str) -> list[Any]:
    """Return the values of a list of classes, or of a text with separators.

    Raises:
        ValueError: it is neither, a list that was written as text, or hot: a 0 or 1 for each class.
    """
    if isinstance(value, str):
        if value.strip().startswith("[") and value.strip().endswith("]"):  # pandas writes lists this way into a .csv
            raise ValueError(
                f"{column} is {shown_value(value)}, a list that was written as text. Write the classes with "
                f"{separator!r} between them, or lists into a .jsonl or .parquet."
            )
        return [type(value)(part.strip()) for part in value.split(separator) if part.strip()]
    if type(value) is int:
        return [value]
    if not isinstance(value, list):
        raise ValueError(
            f"{column} is {shown_value(value)}, and not the classes of a text. Write a list of them, or a text with "
            f"{separator!r} between them; [] is none."
        )
    if len({*map(str, value)}) < len(value) and all(isinstance(each, int | float) and each in (0, 1) for each in value):
        raise ValueError(
            f"{column} is {shorten(str(value), 40)}, a 0 or 1 for each class. Write the list of the classes that a "
            "text has, such as the places of the ones: jq -c '.LABEL |= [to_entries[] | select(.value == 1 or .value "
            f"== true) | .key]', with {column} for LABEL."
        )
    return value


def _label(value: Any, column: str, line: int) -> str:
    with values_as(ValueError, f"line {line}"):
        return class_name(value, column)
