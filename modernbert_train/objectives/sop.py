"""Sentence order: a text is cut in two, the halves may be swapped, and the model predicts whether they were.

The packer's chunk becomes `[CLS] a [SEP] b [SEP]`, one special token more. The cut and the swap are drawn by its key.
The cut is at a sentence end if there is one in the middle half, and otherwise anywhere in it. Original order is 0,
swapped is 1 (ALBERT, arXiv 1909.11942, section 3.1). Its published code takes some second halves from another document;
here both halves are always from one text. A text of one token cannot be cut: it becomes `[CLS] a [SEP] [SEP]` and
counts for its masked tokens only.

Tokens are masked as in mlm.py, in the text after the swap.

Shape legend: T packed tokens, Q sequences of text, P pairs (padded).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, Inputs, PackedText
from modernbert_train.config.schema import SentenceOrderConfig
from modernbert_train.core.keyed_random import hash64, uniform
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.vocabulary import Vocabulary

PAIRS, ORDER = "pairs_P", "swapped_P"  # names of the targets: index of each pair's [CLS], and 0 or 1
_CUT, _SWAP = (np.uint64(n) for n in (0xC7, 0x5A))


class SentenceOrder:
    """Masked tokens and the order of two halves.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids, and the ids that end a sentence.
    """

    def __init__(self, config: SentenceOrderConfig, vocabulary: Vocabulary) -> None:
        self._tokens = MaskedLM(config, vocabulary)
        self._sep_id = vocabulary.sep_id
        self._ends = vocabulary.sentence_ends

    def make(self, text: PackedText, settings: SentenceOrderConfig) -> Inputs:
        """See `Objective.make`."""
        ids_T, segments_T = text.ids_T.copy(), np.zeros_like(text.ids_T)
        swapped_Q = uniform(hash64(text.keys_Q, np.broadcast_to(_SWAP, text.keys_Q.shape))) < settings.swapped_share
        draws_Q = uniform(hash64(text.keys_Q, np.broadcast_to(_CUT, text.keys_Q.shape)))
        pairs, labels = [], []
        inside_T = None if text.inside_words_T is None else text.inside_words_T.copy()  # for concatenated halves
        starts, lengths = [], []  # of the halves; both are masked under one key, as a single text
        for start, length, swapped, draw in zip(
            text.starts_Q.tolist(), text.lengths_Q.tolist(), swapped_Q.tolist(), draws_Q.tolist(), strict=True
        ):
            if length < 2:
                starts.append((start, start + length))
                lengths.append((length, 0))
                continue
            own = text.ids_T[start : start + length]
            cut = self._cut(own, draw)
            first, second = (own[cut:], own[:cut]) if swapped else (own[:cut], own[cut:])
            if swapped and inside_T is not None:
                inside_T[start : start + length] = np.roll(inside_T[start : start + length], -cut)
            middle = start + len(first)
            ids_T[start:middle], ids_T[middle] = first, self._sep_id
            ids_T[middle + 1 : middle + 1 + len(second)] = second
            segments_T[middle + 1 : start + length + 2] = 1  # the second half and its [SEP]
            pairs.append(start - 1)
            labels.append(int(swapped))
            starts.append((start, middle + 1))
            lengths.append((len(first), len(second)))
        text = replace(text, inside_words_T=inside_T)
        masked = self._mask(text, ids_T, np.array(starts).reshape(-1, 2), np.array(lengths).reshape(-1, 2), settings)
        spare = len(text.ids_T) // 4 - len(pairs)  # a pair has at least five tokens
        targets = {
            **masked.targets,
            PAIRS: np.pad(np.array(pairs, dtype=np.int64), (0, spare)),
            ORDER: np.pad(np.array(labels, dtype=np.int64), (0, spare), constant_values=IGNORED_LABEL),
        }
        counts = {**masked.counts, "sop": len(pairs)}
        return replace(masked, targets=targets, counts=counts, segments_T=segments_T)

    def _mask(
        self,
        text: PackedText,
        ids_T: NDArray[np.int64],
        starts_Q2: NDArray[np.int64],
        lengths_Q2: NDArray[np.int64],
        settings: SentenceOrderConfig,
    ) -> Inputs:
        """Mask the halves as one text, without the [SEP] between them: concatenate, mask, and restore the layout."""
        pair_positions = [
            np.r_[start : start + size, other : other + rest]
            for (start, other), (size, rest) in zip(starts_Q2.tolist(), lengths_Q2.tolist(), strict=True)
        ]
        # the same buffer with each sequence's text contiguous, as mlm.py expects it
        joined_T = text.ids_T.copy()
        back_T = np.arange(len(joined_T))
        for start, at, middle, pair in zip(
            text.starts_Q.tolist(),
            pair_positions,
            (starts_Q2[:, 1] - 1).tolist(),
            (lengths_Q2[:, 1] > 0).tolist(),
            strict=True,
        ):
            end = start + len(at)
            joined_T[start:end] = ids_T[at]
            back_T[start:end] = at
            if pair:  # masking=reference predicts the token after the text: first the last [SEP], then the middle one
                back_T[end : end + 2] = end + 1, middle
        inputs = self._tokens.make(replace(text, ids_T=joined_T), settings, lengths_Q2[:, 0])
        out_T = ids_T.copy()
        changed = np.flatnonzero(inputs.ids_T != joined_T)
        out_T[back_T[changed]] = inputs.ids_T[changed]
        positions = back_T[inputs.targets["positions_M"]]
        return replace(inputs, ids_T=out_T, targets={**inputs.targets, "positions_M": positions})

    def _cut(self, own: NDArray[np.int64], draw: float) -> int:
        """Return the number of tokens of the first half, at least one and not all."""
        low, high = max(1, len(own) // 4), max(2, len(own) - len(own) // 4)
        ends = low + np.flatnonzero(np.isin(own[low - 1 : high - 1], self._ends)) if len(self._ends) else np.empty(0)
        cuts = ends if len(ends) else np.arange(low, high)
        return int(cuts[int(draw * len(cuts))])
