"""The architecture of DeBERTa, as a variant of `model`: version 1, and version 2, which is also DeBERTaV3's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH, ModelConfig

if TYPE_CHECKING:
    from modernbert_train.config.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True)
class DebertaConfig(ModelConfig):
    """DeBERTa (arXiv 2006.03654, 2111.09543). The defaults are DeBERTaV3-base.

    Positions enter only as the distance of two tokens. Below half of `buckets` each distance has one vector per
    direction; from there to `max_distance` distances share buckets that widen with their logarithm, and all larger ones
    share the last. So no sequence is too long for the weights. A phase that extends the context raises `max_positions`;
    with `max_distance` unchanged, shorter texts are computed as before; raised too, the same buckets reach farther.
    There is no dropout of attention probabilities, see `BertConfig`.
    """

    name: str = "deberta"
    # v2: distances pass through the projections of the tokens, in log buckets and with a norm; v1: through two separate
    # projections, one vector for each distance, and the projection of keys lacks a bias
    version: Literal["v1", "v2"] = "v2"
    # rows of the embedding, at least the tokenizer's entries; v1: 50,265
    vocab_size: int = knob(128100, above=0, high=MAX_WIDTH)
    # width of the embedding, before a projection to hidden_size; None: hidden_size, as published
    embedding_size: int | None = knob(None, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)  # xsmall: 384; large: 1,024
    num_layers: int = knob(12, above=0, high=MAX_LAYERS)  # small: 6; large: 24
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)  # xsmall: 6; large: 16; heads are 64 wide in all
    # width between the two matrices of the feed-forward; xsmall: 1,536; large: 4,096
    intermediate_size: int = knob(3072, above=0, high=MAX_WIDTH)
    max_positions: int = knob(512, above=0, high=MAX_WIDTH, phased=True)  # tokens of the longest sequence
    # vectors of distances in each direction; v1: 512, for one distance each
    buckets: int = knob(256, above=1, high=MAX_WIDTH)
    # larger distances count as this one; v1: the same as buckets
    max_distance: int = knob(512, above=0, high=MAX_WIDTH, phased=True)
    # tokens that a convolution of the embedding spans, added after the first layer; 0: none; v2-xlarge: 3
    convolution: int = knob(0, low=0, high=99)
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # exact (erf)
    norm_eps: float = knob(1e-7, above=0)
    # dropout of embeddings, of distances in each layer, after the attention's projection and the feed-forward, in
    # training
    dropout: float = knob(0.1, low=0, below=1, phased=True)
    # truncation, in standard deviations; the published code has none, which changes one number in 1.7 million
    init_cutoff: float = knob(5.0, above=0, training=True)
    key_products = 4  # also content with distance, and distance with content

    title = "DeBERTa", "2006.03654"

    @property
    def model_type(self) -> str:
        return "deberta" if self.version == "v1" else "deberta-v2"

    @property
    def details(self) -> str:
        return (
            f"version {self.version}; {self.buckets} vectors of distances in each direction, up to "
            f"{self.max_distance:,} tokens;\n"
            f"  activation {self.activation}, dropout {self.dropout:g}, none of attention probabilities"
        )

    @property
    def phased_details(self) -> Mapping[str, str]:
        return {"farthest distance": f"{self.max_distance:,}"}

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def distance_rows(self) -> int:
        """Rows of the table of distances: ahead, then behind."""
        return 2 * self.buckets

    score_bias = "pairs"

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.convolution and (self.version == "v1" or not self.convolution % 2):
            yield (
                f"model.convolution={self.convolution} with model.version={self.version}: only version v2 has one, "
                "with an equal number of tokens on each side. Set 0, or an odd number and v2."
            )
        if self.version == "v1" and self.max_distance != self.buckets:
            yield (
                f"model.max_distance={self.max_distance} with model.buckets={self.buckets}: version v1 has a vector "
                "for each distance. Set both to the same number; published: 512."
            )
        if self.version == "v2" and self.max_distance <= self.buckets // 2 + 1:
            yield (
                f"model.max_distance={self.max_distance} with model.buckets={self.buckets}: the first "
                f"{self.buckets // 2} distances have one bucket each, and the others must reach farther. Set "
                f"model.max_distance to {self.buckets // 2 + 2} or more; published: twice the buckets."
            )

    def mistakes_in_run(self, objective: ObjectiveConfig, *, from_scratch: bool) -> Iterator[str]:
        """See `ModelConfig`. A convolution always reads the next token, so it allows no causal order."""
        if self.convolution and objective.order != "all":
            yield (
                f"model.convolution={self.convolution} with objective.name={objective.name}: it reads both neighbours "
                "of a token, also the next one, which is predicted. Set model.convolution=0, or objective.name=mlm."
            )
