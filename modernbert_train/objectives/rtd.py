"""Replaced-token detection: a generator fills masked positions, a discriminator classifies each token as replaced.

The generator's input and labels follow mlm.py. At each chosen position a token is drawn from the generator's
prediction, even where its input kept the original token; the discriminator reads the original text with these tokens.
A drawn token that equals the original counts as original (ELECTRA, arXiv 2003.10555, section 2). Two differences from
its published code: positions are chosen exactly and once, not with replacement; and a token is drawn by inverting the
distribution function at a number keyed by the sequence and the position. So the discriminator's input is a function of
key and weights: it does not depend on ranks, microbatches or restarts, and the device draws nothing.

Shape legend: T packed tokens, Q sequences of text, M predicted positions (padded).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import Inputs, PackedText
from modernbert_train.config.schema import ReplacedTokensConfig
from modernbert_train.core.keyed_random import hash64
from modernbert_train.objectives.mlm import POSITIONS, MaskedLM, predictions
from modernbert_train.vocabulary import Vocabulary

DRAWS, TOKENS = "draws_M", "tokens_T"  # names of the targets: 31 uniform bits, and 1 where a token is not a pad
_DRAW = np.uint64(0xD7)


def marks_of(text: PackedText) -> NDArray[np.int64]:
    """Return marks_T: 1 where a token is not a pad, [CLS] and [SEP] included."""
    ends_T = np.zeros(len(text.ids_T) + 1, dtype=np.int64)
    ends_T[text.starts_Q - 1] += 1  # [CLS]
    ends_T[text.starts_Q + text.lengths_Q + 1] -= 1  # after [SEP]
    return np.cumsum(ends_T[:-1])


class ReplacedTokens:
    """Masked tokens, with the random numbers from which replacements are drawn.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: ReplacedTokensConfig, vocabulary: Vocabulary) -> None:
        self._tokens = MaskedLM(config, vocabulary)

    def make(self, text: PackedText, settings: ReplacedTokensConfig) -> Inputs:
        """See `Objective.make`; adds a draw for each predicted position."""
        masked = self._tokens.make(text, settings)
        predicted, positions_M = predictions(masked), masked.targets[POSITIONS]
        positions = positions_M[:predicted]
        sequence = np.searchsorted(text.starts_Q, positions, side="right") - 1
        position = (positions - text.starts_Q[sequence]).astype(np.uint64)
        draws = (hash64(text.keys_Q[sequence] ^ _DRAW, position) >> np.uint64(33)).astype(np.int64)
        targets = {
            **masked.targets,
            DRAWS: np.pad(draws, (0, len(positions_M) - predicted)),
            TOKENS: marks_of(text),
        }
        tokens = int(text.lengths_Q.sum()) + 2 * len(text.lengths_Q)
        return replace(masked, targets=targets, counts={**masked.counts, "rtd": tokens})
