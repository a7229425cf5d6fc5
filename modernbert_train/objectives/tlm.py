"""Translation language modelling: a text and its translation are masked as one sequence (arXiv 1901.07291, 3.3).

A document of pairs is `text [SEP] [CLS] translation`; with the tokens that packing adds, a RoBERTa reads it as a pair,
and tokens of either text see the other. Tokens are masked as in mlm.py, but never the special ones in the middle. A
document without these is masked exactly as in `mlm`, so streams of pairs and of single texts can be mixed. Positions
continue from the first text to the second, or with `objective.reset_positions` restart at 0 with its [CLS], as in the
paper. The paper's language embeddings are not implemented: XLM-R (arXiv 1911.02116) dropped them, so that it reads text
of any language.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import Inputs, PackedText
from modernbert_train.config.schema import TranslationConfig
from modernbert_train.objectives.mlm import POSITIONS, MaskedLM, predictions
from modernbert_train.vocabulary import Vocabulary


class Translation:
    """Masked-language modelling with the 80/10/10 rule over both texts.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: TranslationConfig, vocabulary: Vocabulary) -> None:
        self._tokens = MaskedLM(config, vocabulary)
        self._between = (vocabulary.sep_id, vocabulary.cls_id)
        self._cls_id = vocabulary.cls_id

    def make(self, text: PackedText, settings: TranslationConfig) -> Inputs:
        """See `Objective.make`."""
        joined_T, back_T = text.ids_T.copy(), np.arange(len(text.ids_T))
        lengths_Q, cuts_Q = text.lengths_Q.copy(), text.lengths_Q.copy()
        for sequence, (start, length) in enumerate(zip(text.starts_Q.tolist(), text.lengths_Q.tolist(), strict=True)):
            at = np.arange(start, start + length)
            is_between = np.isin(text.ids_T[at], self._between)
            if not is_between.any():
                continue
            order = np.concatenate([at[~is_between], at[is_between]])  # move the special tokens after the text
            joined_T[at], back_T[at] = text.ids_T[order], order
            lengths_Q[sequence] = length - int(is_between.sum())
            cuts_Q[sequence] = int(is_between.argmax())  # no n-gram crosses from one text into the other
        masked = self._tokens.make(replace(text, ids_T=joined_T, lengths_Q=lengths_Q), settings, cuts_Q)
        out_T = text.ids_T.copy()
        out_T[back_T] = masked.ids_T
        num_predictions, positions_M = predictions(masked), masked.targets[POSITIONS].copy()
        positions_M[:num_predictions] = back_T[positions_M[:num_predictions]]
        restored = replace(masked, ids_T=out_T, targets={**masked.targets, POSITIONS: positions_M})
        return replace(restored, positions_T=self._positions(text)) if settings.reset_positions else restored

    def _positions(self, text: PackedText) -> NDArray[np.int64]:
        """Return positions that restart at 0 at each boundary and at each [CLS]."""
        place_T = np.arange(len(text.ids_T))
        first_T = text.ids_T == self._cls_id
        first_T[text.boundaries[:-1]] = True
        return place_T - np.maximum.accumulate(np.where(first_T, place_T, 0))
