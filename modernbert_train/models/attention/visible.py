"""Visibility: the tokens that a token sees, always of the same sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from modernbert_train.batch import Order

QUERY_BLOCK = 64


class ScoreBias(Protocol):
    """A bias on the scores of a layer, added after scaling."""

    def __call__(self, start: int, end: int) -> Tensor:
        """Return bias_NQK of the sequence whose tokens are start to end of the buffer."""


class PairBias(ScoreBias, Protocol):
    """A bias that can be looked up for each pair, see `Bias` of config/model.py."""

    def of_pairs(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Return a function of head, query and key (indices in the buffer) that looks up one value."""


@dataclass(frozen=True)
class Visible:
    """Which tokens the layers of an encoder see in one microbatch.

    Attributes:
        window: tokens before and after itself that a token sees in local layers; None if all layers are global. In the
            order "given" distances are between positions, since query tokens are elsewhere in the buffer.
        order: in every layer.
        block: queries computed together by a kernel that cuts local layers into blocks; does not change results.
    """

    window: tuple[int, int] | None = None
    order: Order = "all"
    block: int = QUERY_BLOCK

    @classmethod
    def around(cls, half_window: int | None, order: Order = "all", block: int | None = None) -> Visible:
        """Return a window of `half_window` tokens on each side, both ends included; None: the whole sequence.

        In causal order the token itself counts as one of the half window, as in transformers' ModernBertDecoder: with a
        local attention of 128 it sees itself and 63 tokens before it. Ettin's training code saw 64.
        """
        window = None
        if half_window is not None:
            window = (max(0, half_window - 1), 0) if order == "causal" else (half_window, half_window)
        return cls(window, order, block or QUERY_BLOCK)

    def sides(self, window: bool) -> tuple[int, int]:
        """Return the tokens seen before and after a token; -1 means all, as in FlashAttention."""
        before, after = (self.window or (-1, -1)) if window else (-1, -1)
        return before, 0 if self.order == "causal" else after
