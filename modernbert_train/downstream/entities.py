"""Sentences with entities from CoNLL files, as GLiNER learns them and is measured on them, and what became of them.

items      a sentence in words, its entities as (first word, last word, label)
labels     what the model reads of a type: "creative work" for creative-work
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from modernbert_train.config.tools.gliner import GlinerConfig
from modernbert_train.data.conll import read_sentences
from modernbert_train.data.tables import some
from modernbert_train.downstream.runs import has_letter
from modernbert_train.errors import DataError

TRAIN = "train"


class Entity(NamedTuple):
    """Words from `first` to `last`, the last included, that are one entity."""

    first: int
    last: int
    label: str


class Item(NamedTuple):
    """A sentence in words, and its entities."""

    words: tuple[str, ...]
    entities: tuple[Entity, ...]


@dataclass
class Counts:
    """What became of the sentences of a split."""

    texts: int = 0  # learned from, or measured on
    empty: int = 0  # without a letter, left out
    loose_tags: int = 0  # I-x and E-x that go on with no entity of type x, read as a beginning
    entities: int = 0  # in those texts, of the types that training has
    zero_shot_entities: int = 0  # of other types: not learned, and measured for themselves
    wide: int = 0  # entities of more words than max_width, neither learned nor found
    truncated: int = 0  # sentences longer than max_len words, or than the encoder's tokens, cut at the end
    lost: int = 0  # entities cut off with them, neither learned nor found


SAID = {
    "empty": "without a letter, left out",
    "loose_tags": "tags I-x or E-x that continue no entity, read as its beginning",
    "wide": "entities of more words than max_width, neither learned nor found",
    "truncated": "longer than max_len words or the encoder's tokens, cut at the end",
    "lost": "entities cut off, neither learned nor found",
}


@dataclass(frozen=True)
class Corpus:
    """What was read.

    Attributes:
        items: of each split, the training one first.
        labels: that training has, sorted.
        zero_shot: of each split, those that training has not.
        counts: of each split.
    """

    items: Mapping[str, list[Item]]
    labels: tuple[str, ...]
    zero_shot: Mapping[str, tuple[str, ...]]
    counts: Mapping[str, Counts]


def read_corpus(config: GlinerConfig, labels: tuple[str, ...] = ()) -> Corpus:
    """Sentences of all splits.

    Args:
        config: files and names of types.
        labels: that a model was trained for, which is measured again; (): those of the training file, which is read.

    Raises:
        DataError: a file cannot be read or has a broken line, or there is nothing to learn.
    """
    named = {**({} if labels else {TRAIN: config.train}), **config.validation}
    items, counts = {}, {}
    for name, file in named.items():
        items[name], counts[name] = _read(TRAIN if name == TRAIN else f"validation.{name}", Path(file), config)
    if not labels:
        hidden = {label_of(kind, config) for kind in config.zero_shot}
        there = {entity.label for item in items[TRAIN] for entity in item.entities}
        known = there | {entity.label for each in items.values() for item in each for entity in item.entities}
        if wrong := sorted(kind for kind in config.zero_shot if label_of(kind, config) not in known):
            raise DataError(f"zero_shot: no file has an entity of type {some(wrong)}. There are {some(sorted(known))}.")
        labels = tuple(sorted(there - hidden))
        if not labels:
            raise DataError(
                f"train={config.train}: has no entity to learn from{' but those of zero_shot' * bool(there)}. Name a "
                "file with tags B-x and I-x."
            )
        items[TRAIN] = [Item(each.words, of_labels(each, labels)) for each in items[TRAIN]]
    zero_shot = {}
    for name, each in items.items():
        every = [entity for item in each for entity in item.entities]
        zero_shot[name] = tuple(sorted({entity.label for entity in every} - {*labels}))
        counts[name].entities = sum(entity.label in labels for entity in every)
        counts[name].zero_shot_entities = len(every) - counts[name].entities
        counts[name].wide = sum(entity.last - entity.first >= config.max_width for entity in every)
    return Corpus(items, labels, zero_shot, counts)


def label_of(kind: str, config: GlinerConfig) -> str:
    """What the model reads of a type in the files."""
    return config.labels.get(kind) or kind.replace("-", " ").replace("_", " ").strip() or kind


def _read(key: str, path: Path, config: GlinerConfig) -> tuple[list[Item], Counts]:
    from modernbert_train.evals.metrics import spans

    try:
        sentences = list(read_sentences(path))
    except OSError as error:
        raise DataError(f"{key}={path}: cannot be read ({error.strerror}). Name a .conll file.") from None
    except ValueError as error:
        raise DataError(f"{key}={path}: {error}") from None
    items, counts = [], Counts()
    for sentence in sentences:
        counts.loose_tags += sentence.loose
        if not any(map(has_letter, sentence.words)):
            counts.empty += 1
            continue
        found = (Entity(each.first, each.end - 1, label_of(each.kind, config)) for each in spans(sentence.tags))
        items.append(Item(sentence.words, tuple(found)))
    counts.texts = len(items)
    if not items:
        raise DataError(f"{key}={path}: holds no sentence with a letter. Name another file.")
    return items, counts


def of_labels(item: Item, labels: Sequence[str]) -> tuple[Entity, ...]:
    return tuple(entity for entity in item.entities if entity.label in labels)


def tags_of(entities: Sequence[Entity], words: int) -> list[str]:
    """Entities that do not overlap as IOB2 tags."""
    tags = ["O"] * words
    for first, last, label in entities:
        tags[first : last + 1] = [f"B-{label}", *[f"I-{label}"] * (last - first)]
    return tags
