"""Classification of texts and of words: nothing is masked, and labels are stored with the documents.

A pair is a document like any other: its second text follows a [SEP], which no text contains. Every sequence is a whole
document: data/labels.py refuses one that was cut.

Shape legend: T packed tokens, Q sequences of text, P sequences (padded), M words (padded), L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import ClassifyConfig, TagConfig
from modernbert_train.vocabulary import Vocabulary

# names of the targets: the first token of a sequence or a word in T, and its classes
FIRSTS, CLASSES, WORDS, TAGS = "firsts_P", "classes_PL", "words_M", "tags_M"

# kind of labels -> their targets as integers, from the stored labels [Q, L] and the number of logits: a class without a
# logit is ignored, and a score is the bits of its fp32
TARGETS: Mapping[str, Callable[[NDArray[Any], int], NDArray[Any]]] = {
    "single-label": lambda labels_QL, logits: np.where(labels_QL < logits, labels_QL, IGNORED_LABEL),
    "multi-label": lambda labels_QL, logits: labels_QL[:, :logits],
    "regression": lambda labels_QL, logits: labels_QL.astype(np.float32).view(np.int32),
}


class Classify:
    """One class, several classes or a score for each sequence.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: ClassifyConfig, vocabulary: Vocabulary) -> None:
        self._sep_id = vocabulary.sep_id

    def make(self, text: PackedText, settings: ClassifyConfig) -> Inputs:
        """See `Objective.make`."""
        assert text.labels is not None
        classes = TARGETS[settings.kind](text.labels, settings.num_logits)
        spare = len(text.ids_T) // 3 - len(classes)  # a sequence has at least three tokens
        targets = {
            FIRSTS: np.pad(text.starts_Q - 1, (0, spare)),
            CLASSES: np.pad(classes.astype(np.int64), ((0, spare), (0, 0)), constant_values=IGNORED_LABEL).reshape(-1),
        }
        count = int((classes != IGNORED_LABEL).sum())
        segments_T = segments_of(text, self._sep_id) if settings.segments > 1 else None
        return Inputs(text.ids_T, targets, {"classify": count}, segments_T=segments_T)


def segments_of(text: PackedText, sep_id: int) -> NDArray[np.int64]:
    """Return token types: 1 after the [SEP] between two texts, the final [SEP] included."""
    segments_T = np.zeros_like(text.ids_T)
    for start, length in zip(text.starts_Q.tolist(), text.lengths_Q.tolist(), strict=True):
        between = np.flatnonzero(text.ids_T[start : start + length] == sep_id)
        if len(between):
            segments_T[start + int(between[0]) + 1 : start + length + 1] = 1
    return segments_T


class Tag:
    """A class for each word, at its first token.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: TagConfig, vocabulary: Vocabulary) -> None:
        pass

    def make(self, text: PackedText, settings: TagConfig) -> Inputs:
        """See `Objective.make`; a class without a logit is ignored, but keeps its position."""
        assert text.labels is not None
        tags, total = text.labels, int(text.lengths_Q.sum())
        position = np.arange(total) - np.repeat(np.cumsum(text.lengths_Q) - text.lengths_Q, text.lengths_Q)
        positions = np.repeat(text.starts_Q, text.lengths_Q) + position
        words = np.flatnonzero(tags != IGNORED_LABEL)
        spare = len(text.ids_T) - len(words)
        labels = np.where(tags[words] < settings.num_logits, tags[words], IGNORED_LABEL)
        targets = {
            WORDS: np.pad(positions[words], (0, spare)),
            TAGS: np.pad(labels.astype(np.int64), (0, spare), constant_values=IGNORED_LABEL),
        }
        return Inputs(text.ids_T, targets, {"tag": int((labels != IGNORED_LABEL).sum())})
