"""Masked-language modelling: which tokens are predicted and what stands in their place.

Masks are keyed by (seed, epoch, document, start of the piece), never by rank, worker or row, so they need no state.
Each sequence gets its share exactly, rate times its tokens rounded up or down by key, so that short sequences have
targets and the number of targets hardly varies. Special tokens are never masked and never drawn as replacements.

Shape legend: T packed tokens, S sequences, M predicted positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import Masked
from modernbert_train.config.schema import ObjectiveConfig
from modernbert_train.keyed import Keys, hash64, uniform
from modernbert_train.vocabulary import Vocabulary

_COUNT, _SELECT, _KIND, _TOKEN = (np.uint64(n) for n in (0xC0, 0x5E, 0x1D, 0x70))
_SLACK = 32  # see max_predicted


class MaskedLM:
    """The 80/10/10 rule on a fixed share of each sequence.

    Args:
        config: shares of [MASK] and of random tokens.
        vocabulary: the tokenizer's ids.
    """

    def __init__(self, config: ObjectiveConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary

    def corrupt(
        self,
        ids_T: NDArray[np.int64],
        starts_S: NDArray[Any],
        lengths_S: NDArray[Any],
        keys_S: Keys,
        mask_rate: float,
    ) -> Masked:
        """Mask a packed line.

        Args:
            ids_T: token ids; not changed.
            starts_S: index of each sequence's first maskable token.
            lengths_S: number of maskable tokens of each sequence, contiguous from its start.
            keys_S: uint64 key of each sequence.
            mask_rate: share of the maskable tokens to predict.

        Returns:
            The masked line; positions are ascending.
        """
        rounding = uniform(hash64(keys_S, np.broadcast_to(_COUNT, keys_S.shape)))
        counts_S = np.floor(mask_rate * lengths_S + rounding).astype(np.int64)
        counts_S = np.minimum(counts_S, lengths_S)

        # every maskable token: the sequence it belongs to, its place there, and a draw; the lowest draws are predicted
        total = int(lengths_S.sum())
        sequence = np.repeat(np.arange(len(lengths_S)), lengths_S)
        ends = np.cumsum(lengths_S)
        place = np.arange(total) - np.repeat(ends - lengths_S, lengths_S)
        keys = keys_S[sequence]
        counters = place.astype(np.uint64)
        draws = hash64(keys ^ _SELECT, counters)
        order = np.argsort((sequence.astype(np.uint64) << np.uint64(40)) | (draws >> np.uint64(24)), kind="stable")
        chosen = np.sort(order[place < counts_S[sequence]])

        positions = (starts_S[sequence] + place)[chosen]
        labels = ids_T[positions]
        kind = uniform(hash64(keys[chosen] ^ _KIND, counters[chosen]))
        ordinary = self._vocabulary.ordinary
        random_ids = ordinary[hash64(keys[chosen] ^ _TOKEN, counters[chosen]) % np.uint64(len(ordinary))]
        masked, random = self._config.mask_token_share, self._config.random_token_share
        replaced = np.where(kind < masked, self._vocabulary.mask_id, labels)
        replaced = np.where((kind >= masked) & (kind < masked + random), random_ids, replaced)
        input_ids = ids_T.copy()
        input_ids[positions] = replaced
        return Masked(input_ids, positions, labels)

    def max_predicted(self, mask_rate: float, tokens: int) -> int:
        """A bound on the predicted positions in `tokens` packed tokens, so that their number can be padded to it.

        A sequence of n tokens of text has rate * n of them plus a rounding below one, while its two special tokens
        leave 2 * rate unused. With 32 more the bound fails with a probability below e^-38 for rates from 0.15 on.
        """
        return -(-(math.ceil(mask_rate * tokens) + _SLACK) // 8) * 8
