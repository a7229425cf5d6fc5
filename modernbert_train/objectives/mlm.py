"""Masked-language modelling: choose the predicted tokens and replace them.

Masks are keyed by (seed, epoch, document, start of the chunk), never by rank, worker or row, so they need no state.
`objective.masking` chooses the predicted tokens (maskings.py); only `reference` masks and draws special tokens.

`objective.mask_spread` draws the rate of each sequence, `objective.mask_rate_end` moves it through a phase. With
`objective.mask_weight=1/rate` a prediction is weighted by 1 / (rate of its sequence), and the term counts all maskable
tokens: a number known before masking, which does not depend on how a batch is cut. `objective.predict_from=before`
predicts each token at the position of the token before it.

Shape legend: T packed tokens, S sequences, M predicted positions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, WEIGHT_UNIT, Inputs, PackedText
from modernbert_train.config.objective import MASKINGS
from modernbert_train.config.schema import MaskedLmConfig
from modernbert_train.core.keyed_random import Keys, hash64, uniform
from modernbert_train.objectives.maskings import CHOOSE, Candidates, bound
from modernbert_train.vocabulary import Vocabulary

log = logging.getLogger(__name__)

POSITIONS, LABELS = "positions_M", "labels_M"  # names of the targets: indices into T, and ids; IGNORED_LABEL pads
WEIGHTS = "weights_M"  # of the predictions, in units of 1 / WEIGHT_UNIT (batch.py); only with mask_weight
MIN_RATE = 0.001  # lower bound of a rate in 1/rate weights: as in LLaDA's code, and weights fit 32 bits

_COUNT, _SELECT, _KIND, _TOKEN, _RATE = (np.uint64(n) for n in (0xC0, 0x5E, 0x1D, 0x70, 0xAE))


def predictions(inputs: Inputs) -> int:
    """Return the number of predicted tokens, which may differ from the term's count."""
    return int((inputs.targets[LABELS] != IGNORED_LABEL).sum())


@dataclass(frozen=True)
class Masked:
    """A masked buffer: inputs (T), and the predicted positions (M) with their labels (M)."""

    input_ids_T: NDArray[np.int64]
    positions_M: NDArray[np.int64]
    labels_M: NDArray[np.int64]


class MaskedLM:
    """Masked-language modelling with the 80/10/10 rule.

    Args:
        config: how tokens are chosen, shares of [MASK] and of random tokens.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: MaskedLmConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._masking = MASKINGS[config.masking]
        self._mask_id = vocabulary.mask_id
        self._random_ids = vocabulary.ordinary
        if self._masking.takes_special:
            special = (vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id, vocabulary.mask_id)
            self._random_ids = np.arange(max(*special, int(vocabulary.ordinary.max())) + 1)
        self._goes_on = np.zeros(vocabulary.num_entries + 1, dtype=bool)  # the last: ids outside, each a word by itself
        self._goes_on[vocabulary.inside_words] = True
        self._further = np.bincount(vocabulary.further_words, minlength=vocabulary.num_entries + 1)

    def make(self, text: PackedText, settings: MaskedLmConfig, cuts_Q: NDArray[np.int64] | None = None) -> Inputs:
        """See `Objective.make`; `cuts_Q` as in `corrupt`."""
        rate_Q = settings.mask_rate + np.zeros(len(text.keys_Q))
        if settings.mask_spread:
            draw_Q = uniform(hash64(text.keys_Q, np.broadcast_to(_RATE, text.keys_Q.shape)))
            rate_Q = rate_Q + settings.mask_spread * (2 * draw_Q - 1)
        if settings.counts_tokens:
            rate_Q = np.maximum(rate_Q, MIN_RATE)
        bound = self.max_predicted(settings.max_predicted_share, len(text.ids_T))
        at = text.ids_T, text.starts_Q, text.lengths_Q, text.keys_Q
        masked = self.corrupt(*at, rate_Q, cuts_Q, bound, text.inside_words_T)
        positions_M = masked.positions_M - (settings.predict_from == "before")  # texts follow a special token
        predicted = len(masked.labels_M)
        assert predicted <= bound, f"{predicted} predicted positions exceed the bound of {bound}"
        targets = {
            POSITIONS: np.pad(positions_M, (0, bound - predicted)),
            LABELS: np.pad(masked.labels_M, (0, bound - predicted), constant_values=IGNORED_LABEL),
        }
        if not settings.counts_tokens:
            return Inputs(masked.input_ids_T, targets, {"mlm": predicted})
        sequence_M = np.searchsorted(text.starts_Q, masked.positions_M + 1, side="right") - 1  # + 1: [CLS] precedes
        weights_M = np.rint(WEIGHT_UNIT / rate_Q[sequence_M]).astype(np.int64)
        special = 2 * len(text.keys_Q) if self._masking.takes_special else 0
        targets[WEIGHTS] = np.pad(weights_M, (0, bound - predicted))
        return Inputs(masked.input_ids_T, targets, {"mlm": int(text.lengths_Q.sum()) + special})

    def corrupt(
        self,
        ids_T: NDArray[np.int64],
        starts_S: NDArray[Any],
        lengths_S: NDArray[Any],
        keys_S: Keys,
        mask_rate: float | NDArray[np.float64],
        cuts_S: NDArray[np.int64] | None = None,
        max_positions: int | None = None,
        inside_words_T: NDArray[np.bool_] | None = None,
    ) -> Masked:
        """Mask a packed buffer.

        Args:
            ids_T: token ids; not changed. Each sequence's text has one special token before and one after it; padding
                follows up to the next sequence.
            starts_S: index of each sequence's first maskable token, ascending.
            lengths_S: number of maskable tokens of each sequence, contiguous from its start.
            keys_S: uint64 key of each sequence.
            mask_rate: share of the maskable tokens to predict, for all sequences or for each.
            cuts_S: tokens of each sequence before a break in its text, which n-grams may not cross; 0 or all without a
                break. None: no breaks.
            max_positions: largest number of positions to predict; None: `max_predicted`.
            inside_words_T: True for tokens that continue a word; None: by the vocabulary.

        Returns:
            The masked buffer; positions are ascending, at most `max_positions` of them. If more were chosen, those with
            the highest draws are left unmasked, with a warning that counts them.
        """
        maskable_S = predictable_S = lengths_S
        if self._masking.takes_special:
            starts_S = starts_S - 1
            predictable_S = lengths_S + 2
            maskable_S = np.append(starts_S, len(ids_T))[1:] - starts_S

        # every maskable token: its sequence, its position there, and a draw; low draws are masked
        total = int(maskable_S.sum())
        sequence = np.repeat(np.arange(len(maskable_S)), maskable_S)
        position = np.arange(total) - np.repeat(np.cumsum(maskable_S) - maskable_S, maskable_S)
        keys = keys_S[sequence]
        counters = position.astype(np.uint64)
        draws = hash64(keys ^ _SELECT, counters)
        rounding = uniform(hash64(keys_S, np.broadcast_to(_COUNT, keys_S.shape)))
        rate_S = np.broadcast_to(np.asarray(mask_rate, dtype=np.float64), lengths_S.shape)
        counts_S = np.minimum(np.floor(rate_S * lengths_S + rounding).astype(np.int64), lengths_S)

        def continues_word() -> NDArray[np.bool_]:
            at = starts_S[sequence] + position
            return self._goes_on.take(ids_T[at], mode="clip") if inside_words_T is None else inside_words_T[at]

        def further() -> NDArray[np.int64]:
            return self._further.take(ids_T[starts_S[sequence] + position], mode="clip")

        cuts_S = lengths_S if cuts_S is None else cuts_S
        chosen = CHOOSE[self._config.masking](
            Candidates(sequence, position, draws, lengths_S, cuts_S, counts_S, rate_S, keys_S, continues_word, further)
        )
        predicted = position[chosen] < predictable_S[sequence[chosen]]
        if max_positions is None:
            max_positions = self.max_predicted(float(rate_S.max(initial=0.0)), len(ids_T))
        excess = int(predicted.sum()) - max_positions
        if excess > 0:
            log.warning("masking: %d positions more than the fixed number of predictions were left as they are", excess)
            candidates = np.flatnonzero(predicted)
            highest = candidates[np.argsort(draws[chosen[candidates]])[-excess:]]
            chosen, predicted = np.delete(chosen, highest), np.delete(predicted, highest)

        positions = (starts_S[sequence] + position)[chosen]
        originals = ids_T[positions]
        kind = uniform(hash64(keys[chosen] ^ _KIND, counters[chosen]))
        number = np.uint64(len(self._random_ids))
        random_ids = self._random_ids[hash64(keys[chosen] ^ _TOKEN, counters[chosen]) % number]
        masked, random = self._config.mask_token_share, self._config.random_token_share
        replaced = np.where(kind < masked, self._mask_id, originals)
        replaced = np.where((kind >= masked) & (kind < masked + random), random_ids, replaced)
        input_ids = ids_T.copy()
        input_ids[positions] = replaced
        return Masked(input_ids, positions[predicted], originals[predicted])

    def max_predicted(self, mask_rate: float, tokens: int) -> int:
        """Return an upper bound of the predicted positions in `tokens` packed tokens; see `bound`."""
        return bound(self._masking, mask_rate, tokens)
