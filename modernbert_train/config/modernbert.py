"""The architecture of ModernBERT, as a variant of `model`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import CLASSIFIER_WEIGHT, MOST_LAYERS, MOST_WIDTH, nearest
from modernbert_train.config.rope import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(RotaryConfig):
    """ModernBERT. The defaults are ModernBERT-base (arXiv 2412.13663, table 4)."""

    name: str = "modernbert"
    # rows of the embedding, at least the tokenizer's entries; multiples of 64 are faster
    vocab_size: int = knob(50368, above=0, high=MOST_WIDTH)
    hidden_size: int = knob(768, above=0, high=MOST_WIDTH)
    num_layers: int = knob(22, above=0, high=MOST_LAYERS)
    num_heads: int = knob(12, above=0, high=MOST_WIDTH)
    # width after the gate; the GeGLU input projection is twice as wide
    intermediate_size: int = knob(1152, above=0, high=MOST_WIDTH)
    # layers 0, n, 2n, ... attend globally, the others within local_attention
    global_attn_every_n_layers: int = knob(3, above=0, high=MOST_WIDTH)
    # window of local layers in tokens, half on each side, both ends included
    local_attention: int = knob(128, above=0, high=MOST_WIDTH)
    # RoPE base of global layers; 160,000 for 8,192 tokens
    global_rope_theta: float = knob(10_000.0, above=0, phased=True)
    local_rope_theta: float = knob(10_000.0, above=0, phased=True)  # the same of local layers
    local_rope_scaled: bool = knob(False, phased=True)  # rope_scaling is also of local layers
    norm_eps: float = knob(1e-5, above=0)
    # after the attention's output projection, in training only
    attention_out_dropout: float = knob(0.1, low=0, below=1, training=True)
    # "full_megatron": truncated normal, output projections divided by sqrt(2 num_layers)
    init_std: float = knob(0.02, above=0, training=True)
    init_cutoff: float = knob(2.0, above=0, training=True)  # truncation, in standard deviations

    title = "ModernBERT", "2412.13663"

    @property
    def details(self) -> str:
        every = self.global_attn_every_n_layers
        return (
            f"layers 0, {every}, {2 * every}, ... attend globally, the others within\n"
            f"  {self.half_window} tokens on each side; dropout {self.attention_out_dropout:g} after attention"
        )

    @property
    def phased_details(self) -> Mapping[str, str]:
        return {"global RoPE base": self.described_base(True), "local RoPE base": self.described_base(False)}

    @property
    def thetas(self) -> Mapping[bool, float]:
        """See `RotaryConfig`."""
        return {True: self.global_rope_theta, False: self.local_rope_theta}

    pooler_activation = None

    @property
    def pooling(self) -> Literal["mean"]:
        """See `ModelConfig`: as in the released models."""
        return "mean"

    def init_of(self, name: str) -> tuple[float, float | None]:
        """See `ModelConfig`; output projections are smaller, and the classifier is initialized as in transformers."""
        if name == CLASSIFIER_WEIGHT:
            return float(self.hidden_size**-0.5), self.init_cutoff
        narrower = math.sqrt(2 * self.num_layers) if name.endswith("Wo.weight") else 1.0
        return self.init_std / narrower, self.init_cutoff

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        yield from super().mistakes()
        if self.head_size % 2:
            yield f"model.hidden_size/num_heads={self.head_size}: rotary embeddings turn pairs. Make it even."
        if self.local_attention % 2:
            yield f"model.local_attention={self.local_attention}: half of the window is on each side. Make it even."

    def mistakes_from_scratch(self) -> Iterator[str]:
        """See `ModelConfig`."""
        every = self.global_attn_every_n_layers
        if (self.num_layers - 1) % every:
            below = (self.num_layers - 1) // every * every + 1
            yield (
                f"model.num_layers={self.num_layers} with model.global_attn_every_n_layers={every} ends in a local "
                f"layer, and the last must see the whole sequence. Use {below} or {below + every} layers."
            )

    def layers_at(self, depth: float) -> int:
        """See `ModelConfig`; the first and the last layer are global."""
        every = self.global_attn_every_n_layers
        wanted = self.num_layers * depth
        return 1 + every * nearest((wanted - 1) / every) if nearest(wanted) else 0

    @property
    def half_window(self) -> int:
        """Keys visible on each side of a query in local layers: distance 64 attends, 65 does not."""
        return self.local_attention // 2

    def is_global(self, layer: int) -> bool:
        return layer % self.global_attn_every_n_layers == 0
