"""Masked tokens for a model and its teacher: both read the same masked text; see models/distilled.py.

Shape legend: T packed tokens.
"""

from __future__ import annotations

from dataclasses import replace

from modernbert_train.batch import Inputs, PackedText
from modernbert_train.config.schema import DistillConfig
from modernbert_train.objectives.mlm import MaskedLM, predictions
from modernbert_train.objectives.rtd import TOKENS, marks_of
from modernbert_train.vocabulary import Vocabulary


class Distill:
    """Masked-language modelling, plus a mark for tokens that are not pads.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: DistillConfig, vocabulary: Vocabulary) -> None:
        self._tokens = MaskedLM(config, vocabulary)

    def make(self, text: PackedText, settings: DistillConfig) -> Inputs:
        """See `Objective.make`; counts the terms: predictions at masked positions, hidden states at every token, and
        vectors of every sequence."""
        masked = self._tokens.make(text, settings)
        marks_T = marks_of(text)
        counts = {"mlm": masked.counts["mlm"], "kl": predictions(masked)}
        counts |= dict.fromkeys(("cosine", "mse"), int(marks_T.sum())) | {"pooled": len(text.starts_Q)}
        targets = {**masked.targets, TOKENS: marks_T}
        return replace(masked, targets=targets, counts={term: counts[term] for term in settings.terms})
