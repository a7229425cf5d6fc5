"""Replaced-token detection: a generator fills masked positions, the model says of each token whether it was put there.

The generator's input and labels are masked-language modelling's, by the rules of mlm.py. A token is drawn from what the
generator predicts at each chosen position, also where it was shown the token itself, and the discriminator reads the
text as it is with those in it. A token that happens to be the right one counts as the text's own (ELECTRA, arXiv
2003.10555, section 2). Two things differ from its published code: positions are chosen exactly and once, not with
replacement; and a drawn token is the one at which the distribution function passes a number that is drawn here, by the
key of the sequence and the place in it. So what the discriminator reads is a function of key and weights: it does not
depend on ranks, microbatches or restarts, and nothing is drawn on the device.

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

DRAWS, TOKENS = "draws_M", "tokens_T"  # names of the targets: 31 uniform bits, and 1 where a token is no pad
_DRAW = np.uint64(0xD7)


def marks_of(text: PackedText) -> NDArray[np.int64]:
    """marks_T: 1 where a token is no pad, [CLS] and [SEP] included."""
    ends_T = np.zeros(len(text.ids_T) + 1, dtype=np.int64)
    ends_T[text.starts_Q - 1] += 1  # [CLS]
    ends_T[text.starts_Q + text.lengths_Q + 1] -= 1  # after [SEP]
    return np.cumsum(ends_T[:-1])


class ReplacedTokens:
    """Masked tokens, and what is needed to draw others in their place.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: ReplacedTokensConfig, vocabulary: Vocabulary) -> None:
        self._tokens = MaskedLM(config, vocabulary)

    def make(self, text: PackedText, settings: ReplacedTokensConfig) -> Inputs:
        """See `Objective.make`; there is a draw for each place of the predicted positions."""
        masked = self._tokens.make(text, settings)
        predicted, positions_M = predictions(masked), masked.targets[POSITIONS]
        positions = positions_M[:predicted]
        sequence = np.searchsorted(text.starts_Q, positions, side="right") - 1
        place = (positions - text.starts_Q[sequence]).astype(np.uint64)
        draws = (hash64(text.keys_Q[sequence] ^ _DRAW, place) >> np.uint64(33)).astype(np.int64)
        targets = {
            **masked.targets,
            DRAWS: np.pad(draws, (0, len(positions_M) - predicted)),
            TOKENS: marks_of(text),
        }
        tokens = int(text.lengths_Q.sum()) + 2 * len(text.lengths_Q)
        return replace(masked, targets=targets, counts={**masked.counts, "rtd": tokens})
