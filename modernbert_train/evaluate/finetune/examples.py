"""Labelled texts of a task: out of files, or out of a dataset of the hub; with their labels as numbers.

What cannot be learned or told is refused with its place, or left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.conll import (
    Sentence,
    loose_tags,
    read_sentences,
    read_token_lists,
    require_span_tag,
    token_lists,
)
from modernbert_train.data.tables import ENDS, read_rows, some
from modernbert_train.errors import DataError

TRAIN = "train"
_ENDS_OF_WORDS = (".conll", ".jsonl", ".txt")
_ALIASES = {"validation": "dev", "validation_matched": "dev_matched", "validation_mismatched": "dev_mismatched"}


class Example(NamedTuple):
    """A text or a pair, or a sentence in words, with what stands beside it.

    Attributes:
        place: where it stands, for messages.
        texts: one or two; words.
        label: as it was read: a class, classes, a score, or a tag for each word; None where none is read.
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
        loose_tags: see `Sentence`.
        labelled: whether labels were read.
    """

    key: str
    source: str
    examples: list[Example]
    names: tuple[str, ...] = ()
    loose_tags: int = 0
    labelled: bool = True


def files_of(task: TaskConfig) -> dict[str, Path]:
    """The local file of each split, by name; nothing where they are on the hub.

    Raises:
        DataError: a folder has no such file, or a file is of a kind that cannot be read.
    """
    named = {TRAIN: task.train, **task.validation, **task.predict}
    if task.data is not None and not Path(task.data).is_dir():
        return {}
    found = {}
    for name, split in named.items():
        path = Path(split) if task.data is None else _in_folder(task, split)
        ends = _ENDS_OF_WORDS if task.kind == "tokens" else ENDS
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
    ends = (".conll", ".jsonl") if task.kind == "tokens" else ENDS
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
    named = {TRAIN: task.train, **task.validation, **task.predict}
    if files:
        return {name: _of_file(name, path, task) for name, path in files.items()}
    from modernbert_train.evaluate.finetune.hub import read_hub

    found = {}
    for name, split in named.items():
        labelled = name not in task.predict
        found[name] = _of_hub(name, split, task, *read_hub(task, split, labelled), labelled=labelled)
    return found


def _of_file(key: str, path: Path, task: TaskConfig) -> Split:
    labelled, named = key not in task.predict, task.id_column if key != TRAIN else None
    try:
        if task.kind == "tokens":
            return _of_sentences(key, str(path), list(_sentences(path, task, labelled, named)), task, (), labelled)
        others = [name for name in (task.label_column if labelled else None, named) if name is not None]
        rows = read_rows(path, task.text_columns, others, "text_columns, label_column and id_column")
        examples = [
            Example(
                f"{path}: line {row.line}",
                row.texts,
                row.values[0] if labelled else None,
                row.line,
                None if named is None else row.values[-1],
            )
            for row in rows
        ]
        return Split(key, str(path), examples, labelled=labelled)
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be read ({error.strerror}). Name a file of labelled texts.") from None
    except ValueError as error:
        raise DataError(f"{key}={path}: {error}") from None


def _sentences(path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[Sentence]:
    if path.suffix != ".jsonl":
        return read_sentences(path, tagged=labelled, spans=task.spans)
    return read_token_lists(path, task.word_column, task.tag_column if labelled else None, named)


def _of_sentences(
    key: str, source: str, sentences: Sequence[Sentence], task: TaskConfig, names: tuple[str, ...], labelled: bool
) -> Split:
    """Sentences as a split; a whole number for a tag is the class of its place."""
    examples, loose, given = [], 0, tuple(task.labels) or names
    for each in sentences:
        example = Example(f"{source}: line {each.line}", each.words, None, each.line, each.id)
        tags = tuple(by_place(example, tag, given) for tag in each.tags)
        if task.spans:
            for tag in tags:
                require_span_tag(tag, f"line {each.line}")
            loose += loose_tags(tags)
        examples.append(example._replace(label=tags if labelled else None))
    return Split(key, source, examples, names, loose, labelled)


def _of_hub(
    key: str,
    split: str,
    task: TaskConfig,
    rows: Iterator[Mapping[str, Any]],
    names: tuple[str, ...],
    *,
    labelled: bool,
) -> Split:
    source = "/".join(filter(None, (task.data, task.subset, split)))
    if task.kind == "tokens":
        columns = task.word_column, (task.tag_column if labelled else None)
        try:
            sentences = [
                Sentence(
                    number,
                    *token_lists((row[columns[0]], row[columns[1]] if columns[1] else None), columns, f"row {number}"),
                    0,
                    row[task.id_column] if task.id_column else None,
                )
                for number, row in enumerate(rows, start=1)
            ]
            return _of_sentences(key, source, sentences, task, names, labelled)
        except ValueError as error:
            raise DataError(f"{source}: {error}") from None
    examples = []
    for number, row in enumerate(rows, start=1):
        texts = tuple(row[column] for column in task.text_columns)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{source}: row {number}: {some(task.text_columns)} are not texts. Name others.")
        label = row[task.label_column] if labelled else None
        name = row[task.id_column] if task.id_column else None
        examples.append(Example(f"{source}: row {number}", texts, label, number, name))
    return Split(key, source, examples, names, labelled=labelled)


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
