"""The architecture of XLNet, as a variant of `model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH, ModelConfig


@dataclass(frozen=True, kw_only=True)
class XLNetConfig(ModelConfig):
    """XLNet (arXiv 1906.08237). The defaults are XLNet-base, cased.

    It has neither recurrence memory, see docs/encoders.md, nor dropout of attention probabilities: no kernel for packed
    sequences can draw it by key.
    """

    name: str = "xlnet"
    # rows of the embedding, at least the tokenizer's entries
    vocab_size: int = knob(32000, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)  # large: 1,024
    num_layers: int = knob(12, above=0, high=MAX_LAYERS)  # large: 24
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)  # large: 16; heads are 64 wide in both
    # width between the two matrices of the feed-forward; large: 4,096
    intermediate_size: int = knob(3072, above=0, high=MAX_WIDTH)
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # exact (erf), as in transformers; or the published code's tanh
    norm_eps: float = knob(1e-12, above=0)
    # of embeddings, of the table of distances, after the attention's projection, within and after the feed-forward, and
    # after the last layer; in training only
    dropout: float = knob(0.1, low=0, below=1, phased=True)
    # of all matrices and of the biases added to queries, truncated normal
    init_std: float = knob(0.02, above=0, training=True)
    single_class = True
    segments = 2  # token types: a token knows whether another has the same one
    key_products = 3  # also a score for the distance

    title = "XLNet", "1906.08237"

    @property
    def details(self) -> str:
        return (
            f"distances of tokens, no memory of earlier text;\n"
            f"  activation {self.activation}, dropout {self.dropout:g}, none of attention probabilities"
        )

    score_bias = "sequences"

    def mistakes(self) -> Iterator[str]:
        if self.hidden_size % 2:
            yield f"model.hidden_size={self.hidden_size}: a distance has as many sines as cosines. Make it even."
