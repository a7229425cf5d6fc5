"""The architecture of NeoBERT, as a variant of `model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from modernbert_train.config.knob import knob
from modernbert_train.config.model import CLASSIFIER_WEIGHT, MAX_LAYERS, MAX_WIDTH, POOLER_WEIGHT, ModelConfig


@dataclass(frozen=True, kw_only=True)
class NeoBertConfig(ModelConfig):
    """NeoBERT (arXiv 2502.19587), with a fixed RoPE base of 10,000. The defaults are the published model."""

    name: str = "neobert"
    # rows of the embedding and of the decoder, which are not tied; at least the tokenizer's entries
    vocab_size: int = knob(30_522, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)
    num_layers: int = knob(28, above=0, high=MAX_LAYERS)
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)
    # width after the gate, a multiple of 8; the published config.json has 3/2 of it
    intermediate_size: int = knob(2048, above=0, high=MAX_WIDTH)
    norm_eps: float = knob(1e-5, above=0)
    # standard deviation for all matrices: so wide that its truncated middle is uniform, as in the published code
    init_std: float = knob(1.0, above=0, training=True)
    # truncation, in standard deviations; ±0.02 in all, as published
    init_cutoff: float = knob(0.02, above=0, training=True)
    tied = False
    own_code = True

    title = "NeoBERT", "2502.19587"

    details = "RMSNorm, SwiGLU, RoPE base 10,000, no dropout, no biases but the decoder's;\n  decoder not tied"

    def init_of(self, name: str) -> tuple[float, float | None]:
        """See `ModelConfig`; pooler and classifier have a normal distribution."""
        return (0.02, None) if name in (CLASSIFIER_WEIGHT, POOLER_WEIGHT) else super().init_of(name)

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.intermediate_size % 8:
            yield (
                f"model.intermediate_size={self.intermediate_size}: the published code rounds it to a multiple of 8, "
                f"so an export could not be read. Set {-(-self.intermediate_size // 8) * 8}."
            )
        if self.head_size % 2:
            yield f"model.num_heads={self.num_heads}: heads are {self.head_size} wide, and RoPE turns pairs. Set fewer."
