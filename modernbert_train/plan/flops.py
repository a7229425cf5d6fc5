"""FLOPs of a token from the keys that it really sees: its own document, in local layers within the window.

The convention is the literature's (PaLM, arXiv:2204.02311, appendix B): a multiply-add counts two, the backward pass
twice the forward one, recomputation nothing; embeddings, norms and softmax count nothing. A head counts only the
positions it is applied to. census.py lists matrices and windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import OptimConfig
from modernbert_train.plan.census import Census


@dataclass(frozen=True)
class Spans:
    """Keys that a token sees, averaged over all tokens: in global and in local layers; 0 without such layers."""

    whole: float
    local: float


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token in the forward pass, by part; `teacher` is a teacher's forward pass, without a backward pass.

    Attributes:
        passes: see `ObjectiveConfig.forward_passes`.
    """

    layers: float
    global_attention: float
    local_attention: float
    head: float
    passes: int = 1
    teacher: float = 0.0

    @property
    def forward(self) -> float:
        return self.layers + self.global_attention + self.local_attention + self.head

    @property
    def training(self) -> float:
        """FLOPs of training: forward (`passes` times), backward, and a teacher's forward pass."""
        return (2 + self.passes) * self.forward + self.teacher


def mean_keys(
    lengths: Sequence[int] | NDArray[np.integer], window: int | None, order: Order = "all", query_share: float = 0.0
) -> float:
    """Average the keys seen in one layer over the tokens of sequences.

    A sequence of n tokens has n^2 pairs, of which b (b + 1) lie outside a window of w, b = n - 1 - w. In causal order
    it has n (n + 1) / 2; a window then holds the token itself and w - 1 before it, see `Visible.around` of
    models/attention, and hides b (b + 1) / 2, b = n - w.

    In the order "given", m tokens of text are targets, each with a query token. The n - m - 2 other tokens see each
    other; the m targets and the two special tokens see those and, on average, half of the m; a query token sees what
    its target sees, except itself. A window is assumed to hide the same share of these pairs as of all pairs.

    Args:
        lengths: tokens of each sequence, at least one sequence.
        window: tokens on each side; None: all.
        order: the part of its sequence that a token sees.
        query_share: query tokens for each token of text, in the order "given".
    """
    n = np.asarray(lengths, dtype=np.float64)
    causal = order == "causal"
    pairs = n * (n + 1) / 2 if causal else n * n
    if window is not None:
        beyond = np.maximum(0.0, n - (max(1, window) if causal else 1 + window))
        pairs = pairs - beyond * (beyond + 1) / (2 if causal else 1)
    if order == "given":
        predicted = query_share * np.maximum(0.0, n - 2)
        plain = np.maximum(0.0, n - 2) - predicted
        ordered = predicted + 2
        seen = plain * n + ordered * (ordered + 1) / 2 + predicted * (plain + (ordered - 1) / 2)
        pairs = pairs * seen / (n * n)
    return float(pairs.sum() / n.sum())


def mean_spans(
    lengths: Sequence[int] | NDArray[np.integer], model: Census, order: Order = "all", query_share: float = 0.0
) -> Spans:
    """Return `mean_keys` for the global and for the local layers of a model."""
    local = [window for window in model.windows if window is not None]
    keys = {window: mean_keys(lengths, window, order, query_share) for window in {*local, None}}
    return Spans(keys[None], sum(keys[window] for window in local) / max(1, len(local)))


def flops_per_token(
    model: Census, spans: Spans, uses: Mapping[str, float], encoded: float = 1.0, passes: int = 1
) -> Flops:
    """Return the FLOPs of one token's forward pass: 2 for each entry of a matrix, times its uses.

    Args:
        model: the encoder with its heads.
        spans: keys seen.
        uses: for each head, the positions that it is applied to, per token.
        encoded: see `ObjectiveConfig.encoded_tokens`.
        passes: see `ObjectiveConfig.forward_passes`.
    """
    used = [matrix for matrix in model.matrices if matrix.uses and not matrix.once]
    per_use = [(matrix.head, 2.0 * matrix.numbers * matrix.uses * matrix.passes) for matrix in used]
    layers = list(zip(model.key_flops, model.windows, strict=True))
    return Flops(
        layers=encoded * sum(flops for head, flops in per_use if head is None),
        global_attention=spans.whole * sum(flops for flops, window in layers if window is None),
        local_attention=spans.local * sum(flops for flops, window in layers if window is not None),
        head=sum(uses[head] * flops for head, flops in per_use if head is not None),
        passes=passes,
    )


def optimizer_flops(model: Census, optim: OptimConfig) -> int:
    """Return the FLOPs of the matrix products in one update of all weights; only Muon's has any.

    An iteration of Newton-Schulz on a matrix of sides m <= n is X X^T, the square of that, and a product with X:
    2 m^2 n + 2 m^3 + 2 m^2 n.
    """
    sides = [(each.count, *sorted((each.rows, each.columns))) for each in model.hidden]
    return optim.newton_schulz_iterations * sum(count * (4 * m**2 * n + 2 * m**3) for count, m, n in sides)
