"""Extractive answers and multiple choice: nothing is masked, and labels are stored with the documents.

Shape legend: T packed tokens, Q documents, W windows (padded), M tokens of windows (padded), P choices (padded),
G questions (padded), C choices of a question.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import AnswerConfig, ChooseConfig
from modernbert_train.objectives.classify import FIRSTS, segments_of
from modernbert_train.vocabulary import Vocabulary

# names of the targets: each token of a window in T, tokens of each window, start and end of its answer within it; for
# each choice of a question its number among all choices, and the right one
PLACES, LENGTHS, SPANS, CHOICES, RIGHT = "places_M", "lengths_W", "spans_W2", "choices_GC", "right_G"
NO_CHOICE = -1


class Answer:
    """The start and the end of an answer in each window; without an answer both are [CLS], at 0.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: AnswerConfig, vocabulary: Vocabulary) -> None:
        self._sep_id = vocabulary.sep_id

    def make(self, text: PackedText, settings: AnswerConfig) -> Inputs:
        """See `Objective.make`. A window with an unknown answer is ignored."""
        assert text.labels is not None
        whole_Q = text.lengths_Q + 2
        first_Q = np.cumsum(whole_Q) - whole_Q
        places_M = np.arange(int(whole_Q.sum())) + np.repeat(text.starts_Q - 1 - first_Q, whole_Q)
        total, max_questions = len(text.ids_T), len(text.ids_T) // 3
        spare = max_questions - len(whole_Q)
        targets = {
            PLACES: np.pad(places_M, (0, total - len(places_M))),
            LENGTHS: np.pad(whole_Q, (0, spare)),
            SPANS: np.pad(text.labels.astype(np.int64), ((0, spare), (0, 0)), constant_values=IGNORED_LABEL).reshape(
                -1
            ),
        }
        count = int((text.labels[:, 0] != IGNORED_LABEL).sum())
        segments_T = segments_of(text, self._sep_id) if settings.segments > 1 else None
        return Inputs(text.ids_T, targets, {"answer": count}, segments_T=segments_T)


class Choose:
    """The right choice of each question. A document has [SEP] [CLS] between choices and is cut there.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: ChooseConfig, vocabulary: Vocabulary) -> None:
        self._sep_id = vocabulary.sep_id
        self._cls_id = vocabulary.cls_id

    def make(self, text: PackedText, settings: ChooseConfig) -> Inputs:
        """See `Objective.make`."""
        assert text.labels is not None
        choices = [self._choices(text, number) for number in range(len(text.starts_Q))]
        starts_P = np.concatenate([starts for starts, _ in choices] or [np.empty(0, dtype=np.int64)])
        lengths_P = np.concatenate([lengths for _, lengths in choices] or [np.empty(0, dtype=np.int64)])
        cut = replace(text, starts_Q=starts_P, lengths_Q=lengths_P)
        max_choices = len(text.ids_T) // 3  # a choice has at least three tokens
        # and a question two choices
        choices_GC = np.full((max_choices // 2, len(settings.labels)), NO_CHOICE, dtype=np.int64)
        at = 0
        for number, (starts, _) in enumerate(choices):
            choices_GC[number, : len(starts)] = np.arange(at, at + len(starts))
            at += len(starts)
        right = text.labels[:, 0].astype(np.int64)
        targets = {
            FIRSTS: np.pad(starts_P - 1, (0, max_choices - len(starts_P))),
            CHOICES: choices_GC.reshape(-1),
            RIGHT: np.pad(right, (0, len(choices_GC) - len(right)), constant_values=IGNORED_LABEL),
        }
        segments_T = segments_of(cut, self._sep_id) if settings.segments > 1 else None
        boundaries = np.union1d(text.boundaries, starts_P - 1)
        return Inputs(text.ids_T, targets, {"choose": len(right)}, segments_T=segments_T, boundaries=boundaries)

    def _choices(self, text: PackedText, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first token in T of each choice of a document, and its number of tokens."""
        start, length = int(text.starts_Q[number]), int(text.lengths_Q[number])
        inner = np.flatnonzero(text.ids_T[start : start + length] == self._cls_id) + start
        starts = np.concatenate([[start], inner + 1])
        return starts, np.append(inner - 1, start + length) - starts
