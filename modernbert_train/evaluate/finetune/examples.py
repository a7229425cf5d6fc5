"""Labelled texts of a task: one example, a split of examples, and an example encoded as documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from modernbert_train.errors import DataError

TRAIN = "train"


class Example(NamedTuple):
    """A text or a pair, a sentence in words, or a question with its choices; with its label and position.

    Attributes:
        place: file and line, for messages.
        texts: one or two texts; words; or texts followed by choices.
        label: as it was read: a class, classes, a score, a tag for each word, or answers; None where none is read.
        line: line of the file, or row of the dataset.
        id: its identifier, where the task names a column for it.
    """

    place: str
    texts: tuple[str, ...]
    label: Any
    line: int = 0
    id: Any = None


@dataclass(frozen=True)
class Split:
    """The examples of one split.

    Attributes:
        key: the task's key that names it, for messages.
        source: a file, or a dataset's name on the hub.
        examples: all of them.
        names: names of the classes, if the dataset has them.
        labelled: True if labels were read.
    """

    key: str
    source: str
    examples: list[Example]
    names: tuple[str, ...] = ()
    labelled: bool = True


@dataclass(frozen=True)
class Encoded:
    """An example as documents.

    Attributes:
        documents: token ids and label of each document; empty if the example is left out.
        entry: its entry in the file of texts, with the label.
        left_out: the counter in `Counts` that it adds to, if it is left out.
    """

    documents: Sequence[tuple[list[int], NDArray[Any]]]
    entry: dict[str, Any]
    left_out: str = "empty"


def by_place(example: Example, name: str, names: Sequence[str]) -> str:
    """Return the class that a whole number indexes, unless a class has this number as its name."""
    if not names or name in names or not name.lstrip("-").isdecimal():
        return name
    if not 0 <= int(name) < len(names):
        raise DataError(
            f"{example.place}: class {name} of {len(names)} classes. A split that hides its labels belongs "
            "under predict; otherwise name all in labels."
        )
    return names[int(name)]
