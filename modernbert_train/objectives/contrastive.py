"""Contrastive training: a document holds a query, its positive and mined negatives, each a separate sequence.

They are concatenated, `query [SEP] [CLS] positive [SEP] [CLS] negative`, and packing adds the outer tokens, so each is
a whole sequence; no text contains either token. The texts of an example therefore share a row. The labels are, for each
text, a hash, by which equal texts are recognised anywhere, and a teacher's score for it and the query, in units of
`SCORE_UNIT`; 0 without a teacher. Nothing is drawn and nothing is masked.

Shape legend: T packed tokens, Q examples, P texts (padded): all queries, then all positives, then the negatives.
"""

from __future__ import annotations

import numpy as np

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.vocabulary import Vocabulary

# names of the targets: index of each text's [CLS], its role, the halves of its hash
FIRSTS, ROLES, LOW, HIGH = "firsts_P", "roles_P", "low_P", "high_P"
# for each negative: its example, and the margin of scores
EXAMPLES, MARGINS = "examples_P", "margins_P"
QUERY, POSITIVE, NEGATIVE = range(3)


class Contrastive:
    """The contrastive objective's data: queries, positives and negatives as rows.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: ContrastiveConfig, vocabulary: Vocabulary) -> None:
        self._sep_id = vocabulary.sep_id

    def make(self, text: PackedText, settings: ContrastiveConfig) -> Inputs:
        """See `Objective.make`."""
        assert text.labels is not None
        texts: list[tuple[int, int, int, int]] = []  # role, example, [CLS], hash
        inner: list[int] = []
        sizes: list[int] = []  # texts of each example
        for example, (start, length) in enumerate(zip(text.starts_Q.tolist(), text.lengths_Q.tolist(), strict=True)):
            ends = start + np.flatnonzero(text.ids_T[start : start + length] == self._sep_id)
            firsts = [start - 1, *(ends + 1).tolist()]
            inner += firsts[1:]
            sizes.append(len(firsts))
            hashes = text.labels[example, ::2].tolist()
            texts += [(min(index, NEGATIVE), example, first, hashes[index]) for index, first in enumerate(firsts)]
        texts.sort(key=lambda each: each[:2])  # stable sort: an example's negatives keep their order
        columns = np.array(texts, dtype=np.int64).reshape(-1, 4).T
        spare = len(text.ids_T) // 3 - len(texts)  # a text has at least three tokens
        roles_P, examples_P, firsts_P, hashes_P = (np.pad(column, (0, spare)) for column in columns)
        roles_P[len(texts) :] = IGNORED_LABEL
        targets = {
            FIRSTS: firsts_P,
            ROLES: roles_P,
            LOW: hashes_P & 0x7FFFFFFF,
            HIGH: hashes_P >> 31,
        }
        counts = {"contrastive": len(text.starts_Q)}
        if settings.score_weight:
            scores = text.labels[:, 1::2].tolist()
            margins = [row[1] - score for row, number in zip(scores, sizes, strict=True) for score in row[2:number]]
            num_spare = len(roles_P) - len(margins)
            targets[EXAMPLES] = np.pad(examples_P[len(texts) - len(margins) : len(texts)], (0, num_spare))
            targets[MARGINS] = np.pad(np.array(margins, dtype=np.int64), (0, num_spare))
            counts["score"] = len(margins)
        if settings.is_sparse:
            counts["flops"] = len(texts)
        boundaries = np.sort(np.concatenate([text.boundaries, np.array(inner, dtype=np.int64)]))
        return Inputs(text.ids_T, targets, counts, boundaries=boundaries)
