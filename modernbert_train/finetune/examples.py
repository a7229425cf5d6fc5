"""Labelled texts of a task: out of files, or out of a dataset of the hub; with their labels as numbers.

What cannot be learned or told is refused with its place, or left out and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.conll import read_sentences
from modernbert_train.data.labelled import class_name
from modernbert_train.data.tables import ENDS, read_rows, shown_value, some
from modernbert_train.errors import ConfigError, DataError

TRAIN = "train"
_ALIASES = {"validation": "dev", "validation_matched": "dev_matched", "validation_mismatched": "dev_mismatched"}


class Example(NamedTuple):
    """A text or a pair, or a sentence in words, with what stands beside it.

    Attributes:
        place: where it stands, for messages.
        texts: one or two; words.
        label: as it was read: a class, classes, a score, or a tag for each word.
    """

    place: str
    texts: tuple[str, ...]
    label: Any


@dataclass(frozen=True)
class Split:
    """What was read of one split.

    Attributes:
        key: of the task, for messages.
        source: a file, or a name on the hub.
        examples: all of them.
        names: of the classes, if the dataset has them.
        loose_tags: see `Sentence`.
    """

    key: str
    source: str
    examples: list[Example]
    names: tuple[str, ...] = ()
    loose_tags: int = 0


@dataclass(frozen=True)
class Labels:
    """Labels as numbers.

    Attributes:
        names: of the classes, in the order of the logits.
        unseen: of each split, classes that training has not; they have the numbers after those.
        values: of each split and example int32 [1, L], or one for each word; fp32 [1, 1] for scores.
    """

    names: tuple[str, ...]
    unseen: Mapping[str, tuple[str, ...]]
    values: Mapping[str, list[NDArray[Any]]] = field(repr=False)


def files_of(task: TaskConfig) -> dict[str, Path]:
    """The local file of each split, by name; nothing where they are on the hub.

    Raises:
        DataError: a folder has no such file, or a file is of a kind that cannot be read.
    """
    named = {TRAIN: task.train, **task.validation}
    if task.data is not None and not Path(task.data).is_dir():
        return {}
    found = {}
    for name, split in named.items():
        path = Path(split) if task.data is None else _in_folder(task, split)
        ends = (".conll", ".txt") if task.kind == "tokens" else ENDS
        if path.suffix not in ends:
            raise DataError(f"{name}={path}: of which kind is it? For kind={task.kind} name one of {', '.join(ends)}.")
        if not path.is_file():
            raise DataError(f"{name}={path}: no such file. Correct the path.")
        found[name] = path
    return found


def _in_folder(task: TaskConfig, split: str) -> Path:
    folder = Path(str(task.data))
    if task.subset is not None and (folder / task.subset).is_dir():
        folder /= task.subset
    ends = (".conll",) if task.kind == "tokens" else ENDS
    names = [f"{stem}{end}" for stem in (split, _ALIASES.get(split, split)) for end in ends]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder}: has none of {', '.join(dict.fromkeys(names))}. Put the split {split!r} there.")


def read_splits(task: TaskConfig) -> dict[str, Split]:
    """All splits of a task, the training one first.

    Raises:
        DataError: a file cannot be read, lacks a column or has a broken line; names it.
    """
    files = files_of(task)
    named = {TRAIN: task.train, **task.validation}
    if files:
        return {name: _of_file(name, path, task) for name, path in files.items()}
    if task.kind == "tokens":
        raise ConfigError(f"data={task.data}: words with tags are read from .conll files alone. Name a folder of them.")
    from modernbert_train.finetune.hub import read_hub

    return {name: _of_hub(name, split, task, *read_hub(task, split)) for name, split in named.items()}


def _of_file(key: str, path: Path, task: TaskConfig) -> Split:
    try:
        if task.kind == "tokens":
            sentences = list(read_sentences(path))
            examples = [Example(f"{path}: line {each.line}", each.words, each.tags) for each in sentences]
            return Split(key, str(path), examples, loose_tags=sum(each.loose for each in sentences))
        rows = read_rows(path, task.text_columns, (task.label_column,))
        return Split(key, str(path), [Example(f"{path}: line {row.line}", row.texts, row.values[0]) for row in rows])
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be read ({error.strerror}). Name a file of labelled texts.") from None
    except ValueError as error:
        raise DataError(f"{key}={path}: {error}") from None


def _of_hub(key: str, split: str, task: TaskConfig, rows: Iterator[Mapping[str, Any]], names: tuple[str, ...]) -> Split:
    source = "/".join(filter(None, (task.data, task.subset, split)))
    examples = []
    for number, row in enumerate(rows, start=1):
        texts = tuple(row[column] for column in task.text_columns)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{source}: row {number}: {some(task.text_columns)} are not texts. Name others.")
        examples.append(Example(f"{source}: row {number}", texts, row[task.label_column]))
    return Split(key, source, examples, names)


def number_labels(task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
    """Labels of all splits as numbers.

    Raises:
        DataError: a label is none, or the training split has nothing to learn from: names the place.
    """
    if task.kind == "regression":
        values: dict[str, list[NDArray[Any]]] = {
            name: [_score(each) for each in split.examples] for name, split in splits.items()
        }
        if len({float(each[0, 0]) for each in values[TRAIN]}) < 2:
            raise DataError(f"{splits[TRAIN].source}: all scores are one, so there is nothing to learn. Give others.")
        return Labels((), {}, values)
    given = tuple(task.labels) or splits[TRAIN].names
    classes = {name: [_classes(each, task, given) for each in split.examples] for name, split in splits.items()}
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
    return Labels(names, {name: each for name, each in unseen.items() if each}, values)


def _ordered(counts: Mapping[str, int], task: TaskConfig) -> tuple[str, ...]:
    """Whole numbers by size, names by letter; of tags the one outside of entities first."""
    if all(each.lstrip("-").isdecimal() for each in counts):
        return tuple(sorted(counts, key=int))
    return tuple(sorted(counts, key=lambda each: (each != "O", each)) if task.kind == "tokens" else sorted(counts))


def _score(example: Example) -> NDArray[np.float32]:
    value = example.label
    try:
        score = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{example.place}: {shown_value(value)} is no score. Write a finite number, or leave it out.")
    return np.array([[score]], dtype=np.float32)


def _classes(example: Example, task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The classes of an example by name: one, some, or one for each word."""
    if task.kind == "tokens":
        return tuple(example.label)
    value = example.label
    if task.kind == "multi-label" and not isinstance(value, list):
        value = [part.strip() for part in str(value).split(task.label_separator) if part.strip()]
    many = value if task.kind == "multi-label" else [value]
    try:
        found = [class_name(each, task.label_column) for each in many]
    except ValueError as error:
        raise DataError(f"{example.place}: {error}") from None
    return tuple(dict.fromkeys(_by_place(example, each, names) for each in found))


def _by_place(example: Example, name: str, names: Sequence[str]) -> str:
    """A whole number stands for the class of its place, where none is called so."""
    if not names or name in names or not name.lstrip("-").isdecimal():
        return name
    if not 0 <= int(name) < len(names):
        raise DataError(
            f"{example.place}: class {name} of {len(names)} classes. A split that hides its labels cannot be used; "
            "otherwise name all in labels."
        )
    return names[int(name)]


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
