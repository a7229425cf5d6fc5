"""Labels of a task as numbers: of texts a table, of words a line; what cannot be learned or told is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import values_as
from modernbert_train.core.text import number_in
from modernbert_train.data.labelled import class_name
from modernbert_train.data.tables import shown_value, some
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.examples import TRAIN, Example, Split, by_place


@dataclass(frozen=True)
class Labels:
    """Labels as numbers.

    Attributes:
        names: of the classes, in the order of the logits.
        unseen: of each split, classes that training has not; they have the numbers after those.
        values: of each split and example int32 [1, L], or one for each word; fp32 [1, 1] for scores. Zeros where
            no labels are read.
    """

    names: tuple[str, ...]
    unseen: Mapping[str, tuple[str, ...]]
    values: Mapping[str, list[NDArray[Any]]] = field(repr=False)

    def all_names(self, split: str) -> tuple[str, ...]:
        """Of a split, those that training has not at the end."""
        return (*self.names, *self.unseen.get(split, ()))


def number_labels(task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
    """Labels of all splits as numbers.

    Raises:
        DataError: a label is none, or the training split has nothing to learn from: names the place.
    """
    if task.kind == "regression":
        values: dict[str, list[NDArray[Any]]] = {
            name: [_score(each) if split.labelled else np.zeros((1, 1), dtype=np.float32) for each in split.examples]
            for name, split in splits.items()
        }
        if len({float(each[0, 0]) for each in values[TRAIN]}) < 2:
            raise DataError(f"{splits[TRAIN].source}: all scores are one, so there is nothing to learn. Give others.")
        return Labels((), {}, values)
    given = tuple(task.labels) or splits[TRAIN].names
    classes = {
        name: [_classes(each, task, given) for each in split.examples]
        for name, split in splits.items()
        if split.labelled
    }
    counts = Counter(each for found in classes[TRAIN] for each in found)
    if given and (unknown := sorted({*counts} - {*given})):
        raise DataError(
            f"{splits[TRAIN].source}: has the classes {some(unknown)}, which are none of labels={list(given)}. Add "
            "them, or correct the file."
        )
    enough = 2 if task.kind != "multi-label" else 1
    if len(counts) < enough:
        raise DataError(
            f"{splits[TRAIN].source}: all {len(splits[TRAIN].examples):,} texts are of one class "
            f"({some([*counts]) or 'none'}), so there is nothing to learn. Give texts of at least two, or name another "
            "label_column."
        )
    names = given or _ordered(counts, task)
    unseen = {
        name: tuple(sorted({each for found in every for each in found} - {*names})) for name, every in classes.items()
    }
    values = {}
    for name, every in classes.items():
        numbers = {each: number for number, each in enumerate((*names, *unseen[name]))}
        values[name] = [_numbered(found, numbers, len(names), task) for found in every]
    for name, split in splits.items():
        if not split.labelled:
            width = len(names) if task.kind == "multi-label" else 1
            values[name] = [
                np.zeros(len(each.texts) if task.kind == "tokens" else (1, width), dtype=np.int32)
                for each in split.examples
            ]
    return Labels(names, {name: each for name, each in unseen.items() if each}, values)


def _ordered(counts: Mapping[str, int], task: TaskConfig) -> tuple[str, ...]:
    """Whole numbers by size, names by letter; of tags the one outside of entities first."""
    if all(each.lstrip("-").isdecimal() for each in counts):
        return tuple(sorted(counts, key=int))
    return tuple(sorted(counts, key=lambda each: (each != "O", each)) if task.kind == "tokens" else sorted(counts))


def _score(example: Example) -> NDArray[np.float32]:
    value = example.label
    score = number_in(value)
    if not math.isfinite(score):
        raise DataError(f"{example.place}: {shown_value(value)} is no score. Write a finite number, or leave it out.")
    return np.array([[score]], dtype=np.float32)


def _classes(example: Example, task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The classes of an example by name: one, some, or one for each word."""
    if task.kind == "tokens":
        return tuple(example.label)
    value = example.label
    if task.kind == "multi-label" and not isinstance(value, list):
        if str(value).strip().startswith("[") and str(value).strip().endswith("]"):  # as pandas writes it into a .csv
            raise DataError(
                f"{example.place}: {task.label_column} is {shown_value(value)}, a list that was written as text. Write "
                f"the classes with {task.label_separator!r} between them, or lists into a .jsonl or .parquet."
            )
        value = [part.strip() for part in str(value).split(task.label_separator) if part.strip()]
    many = value if task.kind == "multi-label" else [value]
    with values_as(DataError, example.place):
        found = [class_name(each, task.label_column) for each in many]
    return tuple(dict.fromkeys(by_place(example, each, names) for each in found))


def _numbered(found: Sequence[str], numbers: Mapping[str, int], known: int, task: TaskConfig) -> NDArray[np.int32]:
    if task.kind == "multi-label":
        hot = np.zeros((1, known), dtype=np.int32)
        hot[0, [numbers[each] for each in found if numbers[each] < known]] = 1
        return hot
    line = np.array([numbers[each] for each in found], dtype=np.int32)
    return line if task.kind == "tokens" else line.reshape(1, 1)


def of_tokens(values: NDArray[np.int32], firsts: Sequence[int], tokens: int) -> NDArray[np.int32]:
    """Labels of words as those of tokens: of the first of each, where it is left; a word without one has -1."""
    labels = np.full(tokens, IGNORED_LABEL, dtype=np.int32)
    for value, first in zip(values, firsts, strict=True):
        if 0 <= first < tokens:
            labels[first] = value
    return labels
