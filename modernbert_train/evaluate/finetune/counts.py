"""Count the texts of a split by outcome, and describe the counts in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass
class Counts:
    """Texts of a split, by outcome."""

    texts: int = 0  # written
    truncated: int = 0  # cut to the context; for question answering, texts whose question was cut
    empty: int = 0  # without a letter, left out
    unseen: int = 0  # with a class that is missing in training
    loose_tags: int = 0  # I-x and E-x that continue no entity of type x, read as a beginning
    in_train: int = 0  # of a measured split: texts that occur in the training split too
    many_labels: int = 0  # that occur elsewhere in the split with another label
    lost_words: int = 0  # tagged words cut off, or without a separate token: neither learned nor measured
    misplaced: int = 0  # no answer is at answer_start: left out of training, and of the loss


_SAID = {
    "truncated": "longer than the context, cut at the end",
    "empty": "without a letter, left out",
    "unseen": "of classes missing in training, which cannot be predicted correctly",
    "in_train": "that are in train too, so figures measure memorisation",
    "many_labels": "that occur elsewhere with another label",
    "loose_tags": "tags I-x or E-x that continue no entity, read as its beginning",
    "lost_words": "tagged words cut off or without a token of their own, neither learned nor measured",
    "misplaced": "whose answer is not where answer_start says, left out of training and of the loss",
}


def in_words(counts: Counts) -> Iterator[str]:
    """Yield a phrase for each count that deserves a warning."""
    for each in fields(counts):
        if each.name in _SAID and (number := getattr(counts, each.name)):
            yield f"{number:,} {_SAID[each.name]}"
