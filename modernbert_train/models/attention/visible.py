"""Visibility: which tokens of its own sequence a token sees; it never sees another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from modernbert_train.batch import Order

QUERY_BLOCK = 64


class ScoreBias(Protocol):
    """What is added to the scores of a layer after they are scaled."""

    def __call__(self, start: int, end: int) -> Tensor:
        """bias_NQK of the sequence from one index of the buffer to another."""


class PairBias(ScoreBias, Protocol):
    """The same where it is asked for each pair, see `Bias` of config/model.py."""

    def of_pairs(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Of a head, and of the indices of a query and a key in the buffer: one number, looked up."""


@dataclass(frozen=True)
class Visible:
    """What all layers of an encoder see in one microbatch.

    Attributes:
        window: tokens before and after itself that a token sees in local layers; None if no layer is local. In the
            order "given" by their positions, since query tokens stand elsewhere in the buffer.
        order: in every layer.
        block: queries that a kernel which cuts local layers into blocks computes together; nothing else depends on it.
    """

    window: tuple[int, int] | None = None
    order: Order = "all"
    block: int = QUERY_BLOCK

    @classmethod
    def around(cls, half_window: int | None, order: Order = "all", block: int | None = None) -> Visible:
        """A window of so many tokens on each side, both ends included; None: all of the sequence.

        In causal order half the window holds the token itself, as in transformers' ModernBertDecoder: a local
        attention of 128 sees itself and 63 tokens before it. Ettin's training code saw 64.
        """
        window = None
        if half_window is not None:
            window = (max(0, half_window - 1), 0) if order == "causal" else (half_window, half_window)
        return cls(window, order, block or QUERY_BLOCK)

    def sides(self, window: bool) -> tuple[int, int]:
        """Tokens seen before and after itself; -1 is all of them, as FlashAttention says it."""
        before, after = (self.window or (-1, -1)) if window else (-1, -1)
        return before, 0 if self.order == "causal" else after
