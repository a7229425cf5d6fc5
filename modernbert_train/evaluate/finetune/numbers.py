"""Convert the class names of a task to numbers; refuse invalid classes, and splits with nothing to learn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import ScoresConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import values_as
from modernbert_train.core.text import shown_value, some
from modernbert_train.data.read.task_rows import Cell
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.examples import TRAIN, Example, Split, by_place

Logits = Any  # a Tensor; tasks are read and checked without torch
_NO_CLASS = ("nan", "null", "none")  # how programs write missing values into tables


class Outputs(NamedTuple):
    """Predictions of a model for one split, with the right labels.

    Attributes:
        logits: of every document, word or token in order, see `Scores.logits`.
        labels: of each document.
        sizes: rows of `logits` that belong to each document.
        objective: the run's.
        settings: names the metrics.
    """

    logits: Logits
    labels: Sequence[NDArray[Any]]
    sizes: Sequence[int]
    objective: Any
    settings: ScoresConfig


@dataclass(frozen=True)
class Labels:
    """Labels as numbers.

    Attributes:
        names: of the classes, in the order of the logits.
        unseen: of each split, classes missing in training; numbered after `names`.
        values: of each split and example int32 [1, 1], or one for each word; of several classes [1, L], those missing
            in training last; fp32 [1, 1] for scores. Zeros where no labels are read.
    """

    names: tuple[str, ...]
    unseen: Mapping[str, tuple[str, ...]]
    values: Mapping[str, list[NDArray[Any]]] = field(repr=False)

    def all_names(self, split: str) -> tuple[str, ...]:
        """Return a split's classes, with those missing in training last."""
        return (*self.names, *self.unseen.get(split, ()))


class ByClass(Protocol):
    """The methods of a kind whose labels are classes.

    Attributes:
        min_classes: fewest classes that can be learned.
    """

    min_classes: int

    def classes(self, example: Example, task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
        """Return the classes of an example by name."""

    def ordered(self, names: Sequence[str], task: TaskConfig) -> tuple[str, ...]:
        """Return the classes of training in the order of the logits, if the task does not set it."""

    def value(self, numbers: Sequence[int], width: int) -> NDArray[np.int32]:
        """Return an example's label from the numbers of its classes, of `width` in its split."""

    def unread(self, example: Example, width: int) -> NDArray[np.int32]:
        """Return zeros, as the label of an example whose label is not read."""


def number_classes(kind: ByClass, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
    """Return the classes of all splits as numbers.

    Raises:
        DataError: a label is invalid, or the training split has nothing to learn from: names the place.
    """
    listed = tuple(task.labels) or splits[TRAIN].names
    classes = {
        name: [kind.classes(each, task, listed) for each in split.examples]
        for name, split in splits.items()
        if split.labelled
    }
    counts = Counter(each for names_of_row in classes[TRAIN] for each in names_of_row)
    if listed and (unknown := sorted({*counts} - {*listed})):
        raise DataError(
            f"{splits[TRAIN].source}: classes {some(unknown)} are not in labels={list(listed)}. Add them, or correct "
            "the file."
        )
    if len(counts) < kind.min_classes:
        raise DataError(
            f"{splits[TRAIN].source}: all {len(splits[TRAIN].examples):,} texts are of one class "
            f"({some([*counts]) or 'none'}), so there is nothing to learn. Give texts of at least two, or name another "
            "label_column."
        )
    names = listed or kind.ordered([*counts], task)
    unseen = {
        name: tuple(sorted({each for names_of_row in every for each in names_of_row} - {*names}))
        for name, every in classes.items()
    }
    values: dict[str, list[NDArray[Any]]] = {}
    for name, split in splits.items():
        numbers = {each: number for number, each in enumerate((*names, *unseen.get(name, ())))}
        values[name] = (
            [kind.value([numbers[each] for each in names_of_row], len(numbers)) for names_of_row in classes[name]]
            if split.labelled
            else [kind.unread(each, len(numbers)) for each in split.examples]
        )
    return Labels(names, {name: each for name, each in unseen.items() if each}, values)


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return whole numbers in numeric order, names in alphabetical order."""
    are_numbers = all(each.lstrip("-").isdecimal() for each in names)
    return tuple(sorted(names, key=int) if are_numbers else sorted(names))


def named_classes(example: Example, values: Sequence[Any], task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct classes named by values of the label's column.

    Raises:
        DataError: one of them is no class.
    """
    with values_as(DataError, example.place):
        class_names = [class_name(each, task.label_column, names) for each in values]
    are_numbers = [not isinstance(each, str) or isinstance(each, Cell) for each in values]  # a text in .jsonl is a name
    named = zip(class_names, are_numbers, strict=True)
    return tuple(dict.fromkeys(by_place(example, each, names) if is_number else each for each, is_number in named))


def class_name(value: Any, column: str, names: Collection[str] = ()) -> str:
    """Return the class that a value of a column names; in a .csv `nan` and `none` are classes only if `known`.

    Raises:
        ValueError: it is not a class.
    """
    if isinstance(value, bool):
        return str(value).lower()
    name = str(value).strip() if isinstance(value, str | int) else ""
    missing = isinstance(value, Cell) and name.lower() in _NO_CLASS and name not in names
    if name and not missing:
        return name
    raise ValueError(
        f"{column} is {shown_value(value)}, and not a class: a text, a whole number, or true or false. Correct it, or "
        "leave the text out." + " If it is a class, name all classes in labels, or write .jsonl." * missing
    )
