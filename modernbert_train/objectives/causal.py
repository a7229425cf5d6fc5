"""Causal language modelling: each token is predicted from the tokens before it in its sequence.

[CLS] is first, visible to all, and predicts the first token of the text; [SEP] is predicted like any token and predicts
nothing. The encoder attends in causal order; its weights and heads are the ones of masked-language modelling, so a run
may train on both, one phase after the other (arXiv 2507.00994).

Shape legend: T packed tokens.
"""

from __future__ import annotations

import numpy as np

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import CausalLmConfig
from modernbert_train.objectives.mlm import LABELS, POSITIONS
from modernbert_train.vocabulary import Vocabulary


class CausalLM:
    """Next-token prediction at every position.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: CausalLmConfig, vocabulary: Vocabulary) -> None:
        pass

    def make(self, text: PackedText, settings: CausalLmConfig) -> Inputs:
        """See `Objective.make`; the targets have length T, since nearly all positions are used."""
        ids_T, sizes_Q = text.ids_T, text.lengths_Q + 1  # a sequence predicts its text and [SEP]
        total = int(sizes_Q.sum())
        position = np.arange(total) - np.repeat(np.cumsum(sizes_Q) - sizes_Q, sizes_Q)
        from_ = np.repeat(text.starts_Q - 1, sizes_Q) + position  # [CLS] is one token before the text
        spare = len(ids_T) - total
        targets = {
            POSITIONS: np.pad(from_, (0, spare)),
            LABELS: np.pad(ids_T[from_ + 1], (0, spare), constant_values=IGNORED_LABEL),
        }
        return Inputs(ids_T, targets, {"causal": total}, order=settings.order)
