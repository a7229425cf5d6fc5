"""Permutation language modelling: some tokens are predicted one after the other, in a drawn order.

Follows XLNet's published code (zihangdai/xlnet, data_utils.py; arXiv 1906.08237, sections 2.2 and 2.3):

- Spans are predicted: n tokens, n up to `longest_span` with probability proportional to 1/n, within a context of
  `context_ratio` n tokens; a span starts at a drawn position, moved forward to the next word start. Each sequence gets
  its exact share, rounded up or down by key: the last span is cut, and a deficit is filled with random single tokens.
- The predicted tokens, [CLS] and [SEP] are ordered by key. A predicted token is visible to later ones in this order; it
  sees earlier ones, itself, and all tokens that are not predicted. Those see each other only.
- A predicted token sees itself, so it cannot be predicted from its own position. Each has a query token instead:
  [MASK], or the encoder's own vector, at the same position. It sees the tokens before its target in the order, and no
  token sees it.

Two differences from XLNet: a sequence is [CLS] text [SEP], as for any objective, where XLNet's ends with both; and one
order covers a whole sequence, where theirs is drawn for each half of 256 tokens. The number of query tokens is fixed,
so that shapes are static: spare ones are at the end and see nothing.

Shape legend: T packed tokens of text, U with query tokens, Q sequences of text, B boundaries, M predicted tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL, QUERY_RANK, Given, Inputs, PackedText
from modernbert_train.config.schema import PermutationLmConfig
from modernbert_train.core.keyed_random import Keys, hash64, uniform
from modernbert_train.objectives.mlm import LABELS, POSITIONS
from modernbert_train.vocabulary import Vocabulary

_COUNT, _SIZE, _LEAD, _FILL, _ORDER = (np.uint64(n) for n in (0xC0, 0x51, 0x1E, 0xF1, 0x0D))
_SLACK = 32  # see max_predicted
_TAIL = 64  # minimum length of a sequence of spare query tokens


class PermutationLM:
    """Predicted spans in a drawn order, with a query token for each of their tokens.

    Args:
        config: of the objective.
        vocabulary: the tokenizer's ids, and the ids that continue a word.
    """

    def __init__(self, config: PermutationLmConfig, vocabulary: Vocabulary) -> None:
        self._ratio = config.context_ratio
        weights = 1 / np.arange(1, config.longest_span + 1)
        self._up_to = np.cumsum(weights / weights.sum())[:-1]  # probability of a span of at most 1, 2, ... tokens
        self._mask_id, self._pad_id = vocabulary.mask_id, vocabulary.pad_id
        self._inside = np.zeros(vocabulary.num_entries, dtype=bool)
        self._inside[vocabulary.inside_words] = True

    def make(self, text: PackedText, settings: PermutationLmConfig) -> Inputs:
        """See `Objective.make`."""
        predicted_M, sequence_M = self.predicted(text)
        ranks_T, limits_T = _order(text, predicted_M, sequence_M)
        bound = self.max_predicted(len(text.ids_T))
        assert len(predicted_M) <= bound, f"{len(predicted_M)} predicted tokens exceed the bound of {bound}"

        # each sequence, and the padding between rows, shifts by the number of query tokens before it
        starts_B = text.boundaries[:-1]
        queries_B = np.zeros(len(starts_B), dtype=np.int64)
        at_Q = np.searchsorted(starts_B, text.starts_Q - 1)  # index in B of each sequence of text
        queries_B[at_Q] = np.bincount(sequence_M, minlength=len(at_Q))
        boundaries = text.boundaries + np.append(0, np.cumsum(queries_B))
        sizes_B = np.diff(text.boundaries)
        places_T = np.arange(len(text.ids_T)) + np.repeat(boundaries[:-1] - starts_B, sizes_B)
        first_M = boundaries[1:][at_Q] - queries_B[at_Q]  # first query token of each sequence
        within_M = np.arange(len(predicted_M)) - np.searchsorted(sequence_M, sequence_M)
        asked_M = first_M[sequence_M] + within_M

        def laid_out(of_text_T: NDArray[np.int64], of_queries_M: NDArray[np.int64], spare: int) -> NDArray[np.int64]:
            laid_U = np.full(len(text.ids_T) + bound, spare, dtype=np.int64)
            laid_U[places_T], laid_U[asked_M] = of_text_T, of_queries_M
            return laid_U

        positions_T = np.arange(len(text.ids_T)) - np.repeat(starts_B, sizes_B)
        given = Given(
            position_ids_T=laid_out(positions_T, positions_T[predicted_M], 0),
            boundaries=_with_tail(boundaries, len(text.ids_T) + bound, max(_TAIL, int(sizes_B.max(initial=0)))),
            ranks_T=laid_out(ranks_T, np.full_like(predicted_M, QUERY_RANK), QUERY_RANK),
            limits_T=laid_out(limits_T, ranks_T[predicted_M], 0),
        )
        missing = bound - len(predicted_M)
        targets = {
            POSITIONS: np.pad(asked_M, (0, missing)),
            LABELS: np.pad(text.ids_T[predicted_M], (0, missing), constant_values=IGNORED_LABEL),
        }
        ids_U = laid_out(text.ids_T, np.full_like(predicted_M, self._mask_id), self._pad_id)
        return Inputs(ids_U, targets, {"permutation": len(predicted_M)}, order=settings.order, given=given)

    def predicted(self, text: PackedText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the predicted tokens: ascending indices into T, and the sequence number of each."""
        lengths_Q, keys_Q = text.lengths_Q, text.keys_Q
        rounding_Q = uniform(_draws(keys_Q, _COUNT, np.zeros_like(lengths_Q)))
        goal_Q = np.minimum(np.floor(lengths_Q / self._ratio + rounding_Q).astype(np.int64), lengths_Q)

        # a span uses a context of at least `ratio` tokens, which bounds the draws of a sequence
        most_Q = lengths_Q // self._ratio + 1
        sequence, number = _numbered(most_Q)
        sizes = 1 + np.searchsorted(self._up_to, uniform(_draws(keys_Q[sequence], _SIZE, number)), side="right")
        leads = np.floor(uniform(_draws(keys_Q[sequence], _LEAD, number)) * self._ratio * sizes).astype(np.int64)
        drawn = list(zip(sizes.tolist(), leads.tolist(), strict=True))
        # for each token, the first word start at or after it
        place_T = np.arange(len(text.ids_T))
        begins_T = np.where(self._inside[text.ids_T], len(place_T), place_T)
        next_word = np.minimum.accumulate(begins_T[::-1])[::-1].tolist()

        chosen_T = np.zeros(len(text.ids_T), dtype=bool)
        left_Q = goal_Q.copy()
        draw = 0
        for q, (start, length, goal, num_draws) in enumerate(
            zip(text.starts_Q.tolist(), lengths_Q.tolist(), goal_Q.tolist(), most_Q.tolist(), strict=True)
        ):
            at, end = start, start + length
            for size, lead in drawn[draw : draw + num_draws]:
                if goal == 0 or at + lead >= end or (first := next_word[at + lead]) >= end:
                    break
                last = min(first + min(size, goal), end)
                chosen_T[first:last] = True
                goal -= last - first
                at = max(at + self._ratio * size, last)
            left_Q[q] = goal
            draw += num_draws
        return _filled_up(text, chosen_T, left_Q)

    def max_predicted(self, tokens: int) -> int:
        """Return a bound on the predicted tokens in `tokens` packed tokens of text, to which targets are padded.

        A sequence of n tokens of text has n / ratio of them plus a rounding below one, while its two special tokens
        leave 2 / ratio unused. With 32 more the bound fails with a probability below e^-45 for ratios up to 10.
        """
        return -(-(-(-tokens // self._ratio) + _SLACK) // 8) * 8


def _order(
    text: PackedText, predicted_M: NDArray[np.int64], sequence_M: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ranks_T and limits_T: the order of predicted tokens, [CLS] and [SEP] in each sequence; else -1 and 0."""
    number_Q, first_Q = np.arange(len(text.starts_Q)), text.starts_Q - 1
    ordered = np.concatenate([predicted_M, first_Q, text.starts_Q + text.lengths_Q])
    sequence = np.concatenate([sequence_M, number_Q, number_Q])
    draws = _draws(text.keys_Q[sequence], _ORDER, ordered - first_Q[sequence])
    by_draw = np.lexsort((draws, sequence))
    ranks_T = np.full(len(text.ids_T), -1, dtype=np.int64)
    ranks_T[ordered[by_draw]] = np.arange(len(ordered)) - np.searchsorted(sequence[by_draw], sequence[by_draw])
    return ranks_T, ranks_T + 1


def _filled_up(
    text: PackedText, chosen_T: NDArray[np.bool_], left_Q: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Add to the chosen tokens of each sequence as many more as are left, by lowest draw; see `predicted`."""
    sequence, position = _numbered(text.lengths_Q)
    index = text.starts_Q[sequence] + position
    chosen = chosen_T[index]
    free = np.flatnonzero(~chosen)
    draws = _draws(text.keys_Q[sequence[free]], _FILL, position[free])
    by_draw = free[np.lexsort((draws, sequence[free]))]
    first = np.searchsorted(sequence[by_draw], sequence[by_draw])
    chosen[by_draw[np.arange(len(by_draw)) - first < left_Q[sequence[by_draw]]]] = True
    return index[chosen], sequence[chosen]


def _draws(keys: Keys, purpose: np.uint64, counters: NDArray[np.int64]) -> Keys:
    return hash64(keys ^ purpose, counters.astype(np.uint64))


def _numbered(counts_Q: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for counts_Q items of each sequence, the sequence number and the item's number within it."""
    sequence = np.repeat(np.arange(len(counts_Q)), counts_Q)
    return sequence, np.arange(len(sequence)) - np.repeat(np.cumsum(counts_Q) - counts_Q, counts_Q)


def _with_tail(boundaries: NDArray[np.int64], total: int, max_tokens: int) -> NDArray[np.int64]:
    """Append boundaries that cut the spare query tokens into sequences of at most `max_tokens` tokens."""
    inner = np.arange(boundaries[-1] + max_tokens, total, max_tokens)
    return np.concatenate([boundaries, inner, [total] if boundaries[-1] < total else []]).astype(np.int64)
