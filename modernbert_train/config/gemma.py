"""The architecture of Gemma 3's text models, as a variant of `model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modernbert_train.config.knob import knob
from modernbert_train.config.llama import LlamaConfig
from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH
from modernbert_train.config.objective import Order


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """Gemma 3 (arXiv 2503.19786), an encoder, or with `objective.name=causal` a decoder. The defaults are its 270 M."""

    name: str = "gemma"
    vocab_size: int = knob(262_144, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(640, above=0, high=MAX_WIDTH)
    num_layers: int = knob(18, above=0, high=MAX_LAYERS)
    num_heads: int = knob(4, above=0, high=MAX_WIDTH)
    key_value_heads: int | None = knob(1, above=0, high=MAX_WIDTH)
    head_width: int | None = knob(256, above=0, high=MAX_WIDTH)
    intermediate_size: int = knob(2048, above=0, high=MAX_WIDTH)
    rope_theta: float = knob(1_000_000.0, above=0, phased=True)  # of global layers
    local_rope_theta: float = knob(10_000.0, above=0, phased=True)
    local_rope_scaled: bool = knob(False, phased=True)  # apply rope_scaling to local layers too
    # window of local layers in tokens: in causal order the token and those before it, else half on each side and itself
    local_attention: int = knob(512, above=1, high=MAX_WIDTH)
    # layers n, 2n, ..., counted from 1, attend globally
    global_every: int = knob(6, above=0, high=MAX_WIDTH)
    qk_norm: bool = True
    norm_eps: float = knob(1e-6, above=0)
    single_class = True

    def half_window(self, order: Order) -> int:
        """See `Visible.around`."""
        return self.local_attention if order == "causal" else self.local_attention // 2

    def is_global(self, layer: int) -> bool:
        return (layer + 1) % self.global_every == 0

    title = "Gemma 3", "2503.19786"

    @property
    def details(self) -> str:
        return (
            f"one layer in {self.global_every} attends globally, the others within {self.local_attention} tokens;\n"
            f"  {self.kv_heads} heads of keys and values, RMSNorm before and after each part, no dropout"
        )

    @property
    def phased_details(self) -> Mapping[str, str]:
        return {**super().phased_details, "local RoPE base": self.described_base(False)}

    @property
    def thetas(self) -> Mapping[bool, float]:
        """See `RotaryConfig`."""
        return {True: self.rope_theta, False: self.local_rope_theta}

    model_type = "gemma3_text"

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        yield from super().mistakes()
        if self.qkv_bias or not self.qk_norm or not self.tied:
            yield "model.qkv_bias, model.qk_norm and model.tied of a gemma are false, true and true. Leave them out."
        if self.local_attention % 2:
            yield f"model.local_attention={self.local_attention}: half the window lies on each side. Make it even."
