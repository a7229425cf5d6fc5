"""The architecture of Llama, EuroBERT and Qwen, as a variant of `model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH, RotaryConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """An encoder, or with `objective.name=causal` a decoder, of Llama's shape (arXiv 2302.13971).

    The defaults are EuroBERT-210m (arXiv 2503.05500). `qk_norm` makes it a Qwen3, `qkv_bias` a Qwen2.
    """

    name: str = "llama"
    # rows of the embedding, at least the tokenizer's entries
    vocab_size: int = knob(128_256, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)
    num_layers: int = knob(12, above=0, high=MAX_LAYERS)
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)
    # heads of keys and values, each shared by num_heads / key_value_heads heads of queries; None: num_heads
    key_value_heads: int | None = knob(None, above=0, high=MAX_WIDTH)
    head_width: int | None = knob(None, above=0, high=MAX_WIDTH)  # None: hidden_size / num_heads
    # width after the gate; the input projection is twice as wide
    intermediate_size: int = knob(3072, above=0, high=MAX_WIDTH)
    rope_theta: float = knob(250_000.0, above=0, phased=True)  # base of the rotary positions
    qk_norm: bool = False  # a norm of each head's queries and keys, before the rotation
    qkv_bias: bool = False  # biases of the projections to queries, keys and values
    tied: bool = True  # the decoder is the embedding; EuroBERT: false
    norm_eps: float = knob(1e-5, above=0)
    decoder_bias = False

    @property
    def head_size(self) -> int:
        return self.head_width or self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """See `ModelConfig`."""
        return self.key_value_heads or self.num_heads

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def title(self) -> tuple[str, str | None]:
        if self.qk_norm:
            return "Qwen3", "2505.09388"
        return ("Qwen2", "2407.10671") if self.qkv_bias else ("Llama", "2302.13971")

    @property
    def details(self) -> str:
        return (
            f"{self.kv_heads} heads of keys and values, RMSNorm, SwiGLU, no dropout;\n"
            f"  decoder {'tied to the embedding' if self.tied else 'not tied'}"
        )

    @property
    def phased_details(self) -> Mapping[str, str]:
        return {"RoPE base": self.described_base()}

    @property
    def thetas(self) -> Mapping[bool, float]:
        """See `RotaryConfig`."""
        return {True: self.rope_theta}

    @property
    def single_class(self) -> bool:
        return self.qk_norm or self.qkv_bias

    @property
    def model_type(self) -> str:
        """See `ModelConfig`: for an encoder, which sees both sides."""
        if self.qk_norm:
            return "qwen3"
        return "qwen2" if self.qkv_bias else "eurobert"

    pooler_activation = "gelu"  # EuroBERT's
    pooling = "mean"

    def architecture(self) -> dict[str, object]:
        """See `ModelConfig`; exports write the numbers of heads and their width explicitly."""
        return super().architecture() | {"key_value_heads": self.kv_heads, "head_width": self.head_size}

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        yield from super().mistakes()
        if self.num_heads % self.kv_heads:
            yield (
                f"model.key_value_heads={self.key_value_heads}: each must be shared by equally many of the "
                f"{self.num_heads} heads of queries. Set a divisor of model.num_heads."
            )
        if self.head_size % 2:
            yield f"model.head_width={self.head_size}: rotary embeddings turn pairs. Make it even."
        if self.qk_norm and self.qkv_bias:
            yield "model.qkv_bias=true with model.qk_norm=true: no released model has both. Set one of them to false."

    def scaled(self, depth: float, width: float) -> Self:
        """See `ModelConfig`; a head of keys serves as many queries as here, or one if that does not divide evenly."""
        small = super().scaled(depth, width)
        shared = self.num_heads // self.kv_heads
        hidden = small.num_heads * (self.hidden_size // self.num_heads)
        ffn = round(self.intermediate_size * hidden / self.hidden_size)
        kv_heads = small.num_heads // (1 if small.num_heads % shared else shared)
        return replace(small, hidden_size=hidden, intermediate_size=ffn, key_value_heads=kv_heads)
