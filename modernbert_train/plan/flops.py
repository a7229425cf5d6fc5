"""FLOPs of a token from the keys that it truly sees: its own document, in local layers within the window.

Counting is that of the literature (PaLM, arXiv:2204.02311, appendix B): a multiply-add counts two, the backward pass
twice the forward one, recomputation nothing; embeddings, norms and softmax count nothing. The head counts the
predicted positions only, because nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import ModelConfig, ModernBertConfig, MuonConfig, OptimConfig
from modernbert_train.plan.parameters import hidden_matrices


@dataclass(frozen=True)
class Spans:
    """Keys that a token sees, the mean over all tokens: in global layers, and in local ones."""

    whole: float
    local: float


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token in the forward pass, by part."""

    layers: float
    global_attention: float
    local_attention: float
    head: float

    @property
    def forward(self) -> float:
        return self.layers + self.global_attention + self.local_attention + self.head

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 3 * self.forward


def mean_spans(lengths: Sequence[int] | NDArray[np.integer], half_window: int) -> Spans:
    """Average the keys seen over the tokens of sequences.

    A sequence of n tokens has n^2 pairs, of which b (b + 1) are further apart than the window, b = n - 1 - half_window.

    Args:
        lengths: tokens of each sequence, at least one sequence.
        half_window: keys visible on each side in local layers.
    """
    n = np.asarray(lengths, dtype=np.float64)
    beyond = np.maximum(0.0, n - 1 - half_window)
    tokens = n.sum()
    return Spans(float((n * n).sum() / tokens), float((n * n - beyond * (beyond + 1)).sum() / tokens))


def flops_per_token(model: ModernBertConfig, spans: Spans, predicted_share: float) -> Flops:
    """FLOPs of the forward pass for one token.

    With D the model width, F the hidden width, V the vocabulary, L layers of which G are global:

        layers      2 L (4 D^2 + 3 D F)
        attention   4 D keys for each layer: scores, and the weighted sum of values
        head        2 (D^2 + D V) for each predicted token

    Args:
        model: the encoder.
        spans: keys seen.
        predicted_share: predicted positions over tokens.
    """
    width, layers = model.hidden_size, model.num_layers
    num_global = sum(model.is_global(index) for index in range(layers))
    return Flops(
        layers=2.0 * layers * (4 * width**2 + 3 * width * model.intermediate_size),
        global_attention=4.0 * width * num_global * spans.whole,
        local_attention=4.0 * width * (layers - num_global) * spans.local,
        head=2.0 * width * (width + model.vocab_size) * predicted_share,
    )


def optimizer_flops(model: ModelConfig, optim: OptimConfig) -> int:
    """FLOPs of the matrix products of one update of all weights; 0 but for Muon.

    An iteration of Newton-Schulz on a matrix of sides m <= n is X X^T, the square of that, and a product with X:
    2 m^2 n + 2 m^3 + 2 m^2 n.
    """
    if not isinstance(optim, MuonConfig):
        return 0
    sides = [(count, min(shape), max(shape)) for count, *shape in hidden_matrices(model)]
    return optim.newton_schulz_iterations * sum(count * (4 * m**2 * n + 2 * m**3) for count, m, n in sides)
