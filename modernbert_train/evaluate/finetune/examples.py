"""Labelled texts of a task: an example, a split of them, and what one is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from modernbert_train.errors import DataError

TRAIN = "train"


class Example(NamedTuple):
    """A text or a pair, a sentence in words, or a question with its choices; with what stands beside it.

    Attributes:
        place: where it stands, for messages.
        texts: one or two; words; texts and then choices.
        label: as it was read: a class, classes, a score, a tag for each word, or answers; None where none is read.
        line: of the file, or row of the dataset.
        id: what names it, where the task says.
    """

    place: str
    texts: tuple[str, ...]
    label: Any
    line: int = 0
    id: Any = None


@dataclass(frozen=True)
class Split:
    """What was read of one split.

    Attributes:
        key: of the task, for messages.
        source: a file, or a name on the hub.
        examples: all of them.
        names: of the classes, if the dataset has them.
        labelled: whether labels were read.
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
        documents: token ids, and the label beside them, of each; none of what is left out.
        said: of it in the file of texts, its label too.
        left_out: the count of those that are, see `Counts`.
    """

    documents: Sequence[tuple[list[int], NDArray[Any]]]
    said: dict[str, Any]
    left_out: str = "empty"


def by_place(example: Example, name: str, names: Sequence[str]) -> str:
    """A whole number stands for the class of its place, where none is called so."""
    if not names or name in names or not name.lstrip("-").isdecimal():
        return name
    if not 0 <= int(name) < len(names):
        raise DataError(
            f"{example.place}: class {name} of {len(names)} classes. A split that hides its labels belongs "
            "under predict; otherwise name all in labels."
        )
    return names[int(name)]
