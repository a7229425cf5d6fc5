"""The architecture: keys of every encoder, of scaled rotary positions, and ModernBERT's. Another encoder is a file
like this and a row in schema.VARIANTS. Keys that a phase may change are marked `phased`; all others determine the
weights' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from omegaconf import MISSING

from modernbert_train.config.knob import architecture_keys, knob

if TYPE_CHECKING:
    from modernbert_train.config.objective import ObjectiveConfig

# Beyond every known model; larger numbers in an untrusted file would build layers, or fill memory, without end.
MAX_LAYERS = 1_000
MAX_WIDTH = 1 << 24
CLASSIFIER_WEIGHT, POOLER_WEIGHT = "classifier.weight", "pooler.dense.weight"  # initialized by a fine-tuning


# one bias for a whole sequence, or one for each pair of tokens, from tables that grow with the tokens
Bias = Literal["sequences", "pairs"]
TILE_HEADS = (16, 32, 64, 128)  # widths of heads that the attention kernel tiles supports
CUDNN_HEADS = range(8, 129, 8)  # the same of cudnn; its backward pass supports no wider heads


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Keys of every encoder."""

    name: str = MISSING
    vocab_size: int = knob(above=0, high=MAX_WIDTH)
    hidden_size: int = knob(above=0, high=MAX_WIDTH)
    num_layers: int = knob(above=0, high=MAX_LAYERS)
    num_heads: int = knob(above=0, high=MAX_WIDTH)
    intermediate_size: int = knob(above=0, high=MAX_WIDTH)
    norm_eps: float = knob(above=0)
    init_std: float = knob(0.02, above=0, training=True)  # of all matrices, truncated normal
    init_cutoff: float = knob(2.0, above=0, training=True)  # truncation, in standard deviations

    def architecture(self) -> dict[str, object]:
        """Return the keys that weights depend on with their effective values, including open keys."""
        return {key: getattr(self, key) for key in architecture_keys(self)}

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def title(self) -> tuple[str, str | None]:
        """The usual name, and the arXiv number of the paper."""
        return self.name, None

    @property
    def details(self) -> str:
        """The architecture in words, beyond the numbers that every encoder has; for a model card."""
        return f"model.name={self.name}"

    @property
    def phased_details(self) -> Mapping[str, str]:
        """Phased settings, heading -> value; each is a column of a model card's table of phases."""
        return {}

    @property
    def single_class(self) -> bool:
        """True if transformers has one class for all objectives that predict tokens, and calls it causal."""
        return False

    pooler_activation: ClassVar[Literal["tanh", "relu", "gelu"] | None] = "tanh"
    """Activation of the pooler that a classifier reads, see models/classifier.py; None: the masked-LM head."""

    pooling: ClassVar[Literal["cls", "mean"]] = "cls"
    """The usual pooling of a classifier, which can be exported."""

    @property
    def model_type(self) -> str:
        """The name in transformers."""
        return self.name

    own_code: ClassVar[bool] = False
    """True if transformers lacks a class for it, and runs code from the hub if the user allows that."""

    def is_global(self, layer: int) -> bool:
        """Return True if a token of this layer sees its whole sequence, not only a window."""
        return True

    @property
    def local_heads(self) -> int | None:
        """Width of the heads of windowed layers; None if there is no such layer."""
        return None if all(map(self.is_global, range(self.num_layers))) else self.head_size

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest sequence, special ones included; None: any number."""
        return None

    @property
    def segments(self) -> int:
        """Token types; 0: none."""
        return 0

    @property
    def dropout(self) -> float:
        """Dropout before the classes of a fine-tuning, as in transformers' classes."""
        return 0.0

    @property
    def has_dropout(self) -> bool:
        """True if hidden states are dropped in pretraining, whose mask is kept for the backward pass."""
        return self.dropout > 0

    @property
    def embedding_width(self) -> int:
        """Numbers in a token's row of the embedding."""
        return self.hidden_size

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads

    @property
    def attention_width(self) -> int:
        """Width of a token's queries, all heads together."""
        return self.hidden_size

    decoder_bias: ClassVar[bool] = True
    """True if the decoder adds a bias to each token's logit."""

    @property
    def tied(self) -> bool:
        """True if the decoder is the embedding."""
        return True

    @property
    def unit_passes(self) -> tuple[int, ...]:
        """For each of `Encoder.layers`, the number of passes of a token through it; above 1 if weights are shared."""
        return (1,) * self.num_layers

    @property
    def stored(self) -> ModelConfig:
        """The equivalent model in the file format of other libraries: itself, or one that shares fewer weights."""
        return self

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the parameters of `stored` that equal a parameter: itself, or several."""
        return (name,)

    score_bias: ClassVar[Bias | None] = None
    """The form of the bias that is added to attention scores, which few kernels support; None: no bias."""

    key_products: ClassVar[int] = 2
    """Products of the model's width for each pair of tokens in attention: score, weighted sum."""

    def mistakes(self) -> Iterator[str]:
        """Yield a message for each impossible combination of keys, for `check`; every number is within its bounds."""
        yield from ()

    def mistakes_in_run(self, objective: ObjectiveConfig, *, from_scratch: bool) -> Iterator[str]:
        """Yield a message for each setting that does not fit the objective, or that a new model should not have."""
        yield from ()

    def mistakes_with(self, tokenizer: str, *, pad_id: int, mask_id: int) -> Iterator[str]:
        """Yield a message for each setting that does not fit the ids of [PAD] and [MASK] in the run's tokenizer."""
        yield from ()

    def init_of(self, name: str) -> tuple[float, float | None]:
        """Return a matrix's initial standard deviation and truncation, in standard deviations, by its parameter's name.

        Without truncation the second is None. Pooler and classifier are initialized as in transformers, which truncates
        only ModernBERT's.
        """
        return self.init_std, None if name in (CLASSIFIER_WEIGHT, POOLER_WEIGHT) else self.init_cutoff

    def scaled(self, depth: float, width: float) -> Self:
        """Return the same architecture with these fractions of its layers and width, rounded to whole numbers.

        Heads keep their size, so the width is in whole heads; the hidden width follows it. A fraction may leave no
        layer or no head, which `check` refuses.
        """
        heads = _nearest(self.num_heads * width)
        hidden = heads * self.head_size
        return replace(
            self,
            num_layers=self.layers_at(depth),
            num_heads=heads,
            hidden_size=hidden,
            intermediate_size=_nearest(self.intermediate_size * hidden / self.hidden_size),
        )

    def layers_at(self, depth: float) -> int:
        """Return a fraction of the layers, rounded."""
        return _nearest(self.num_layers * depth)


def _nearest(number: float) -> int:
    return math.floor(number + 0.5)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ModelConfig):
    """Keys of encoders whose rotary positions can be scaled, to read longer texts than those in training."""

    # which angles of the rotary positions are divided by rope_factor: none; linear: all; llama3 (Llama 3.1) and yarn
    # (arXiv 2309.00071): the slow ones, not the fast ones, and in part those between
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = knob("none", phased=True)
    rope_factor: float = knob(1.0, low=1, phased=True)  # texts are longer by this factor
    # tokens of the longest text before scaling; slow angles make few full turns within it, fast ones many
    rope_original_tokens: int = knob(8192, above=0, high=MAX_WIDTH, phased=True)
    rope_low_freq: float = knob(1.0, above=0, phased=True)  # llama3: angles with fewer turns are slow
    rope_high_freq: float = knob(4.0, above=0, phased=True)  # llama3: angles with more turns are fast
    rope_beta_slow: float = knob(1.0, above=0, phased=True)  # yarn: as rope_low_freq
    rope_beta_fast: float = knob(32.0, above=0, phased=True)  # yarn: as rope_high_freq
    # yarn: factor of queries and keys; None: 0.1 ln(rope_factor) + 1
    rope_attention_factor: float | None = knob(None, above=0, phased=True)

    @property
    def local_rope_scaled(self) -> bool:
        """True if rope_scaling applies to local layers too; a key of encoders that have such layers."""
        return False

    @property
    def thetas(self) -> Mapping[bool, float]:
        """RoPE bases of global (True) and local (False) layers."""
        raise NotImplementedError

    def is_scaled(self, is_global: bool) -> bool:
        """True if rope_scaling applies to global (True) or local (False) layers."""
        return self.rope_scaling != "none" and (is_global or self.local_rope_scaled)

    def described_base(self, is_global: bool = True) -> str:
        """The RoPE base and its scaling in words, for a model card and for a run's first lines."""
        scaled = f", {self.rope_scaling} by {self.rope_factor:g}" if self.is_scaled(is_global) else ""
        return f"{self.thetas[is_global]:,.0f}{scaled}"

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.rope_factor != 1 and self.rope_scaling == "none":
            yield f"model.rope_factor={self.rope_factor:g} with model.rope_scaling=none: set yarn, linear, llama3 or 1."
        if self.rope_factor == 1 and self.rope_scaling != "none" and self.rope_attention_factor is None:
            yield f"model.rope_scaling={self.rope_scaling} with model.rope_factor=1 scales nothing: set a larger one."
        if self.rope_scaling == "llama3" and self.rope_high_freq <= self.rope_low_freq:
            yield (
                f"model.rope_high_freq={self.rope_high_freq:g} with model.rope_low_freq={self.rope_low_freq:g}: set a "
                "larger one; Llama 3.1 has 4 and 1."
            )
        if self.rope_scaling == "yarn" and self.rope_beta_fast <= self.rope_beta_slow:
            yield (
                f"model.rope_beta_fast={self.rope_beta_fast:g} with model.rope_beta_slow={self.rope_beta_slow:g}: set "
                "a larger one; the paper has 32 and 1."
            )
        if self.rope_scaling == "yarn" and min(self.thetas.values()) <= 1:
            yield f"model.rope_scaling=yarn with a RoPE base of {min(self.thetas.values()):g}: set one above 1."
        if self.local_rope_scaled and self.rope_scaling == "none":
            yield "model.local_rope_scaled=true with model.rope_scaling=none: set linear, llama3 or yarn, or false."


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(RotaryConfig):
    """ModernBERT. The defaults are ModernBERT-base (arXiv 2412.13663, table 4)."""

    name: str = "modernbert"
    # rows of the embedding, at least the tokenizer's entries; multiples of 64 are faster
    vocab_size: int = knob(50368, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)
    num_layers: int = knob(22, above=0, high=MAX_LAYERS)
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)
    # width after the gate; the GeGLU input projection is twice as wide
    intermediate_size: int = knob(1152, above=0, high=MAX_WIDTH)
    # layers 0, n, 2n, ... attend globally, the others within local_attention
    global_attn_every_n_layers: int = knob(3, above=0, high=MAX_WIDTH)
    # window of local layers in tokens, half on each side, both ends included
    local_attention: int = knob(128, above=0, high=MAX_WIDTH)
    # RoPE base of global layers; 160,000 for 8,192 tokens
    global_rope_theta: float = knob(10_000.0, above=0, phased=True)
    local_rope_theta: float = knob(10_000.0, above=0, phased=True)  # RoPE base of local layers
    local_rope_scaled: bool = knob(False, phased=True)  # apply rope_scaling to local layers too
    norm_eps: float = knob(1e-5, above=0)
    # after the attention's output projection, in training only
    attention_out_dropout: float = knob(0.1, low=0, below=1, training=True)
    # "full_megatron": truncated normal, output projections divided by sqrt(2 num_layers)
    init_std: float = knob(0.02, above=0, training=True)

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

    @property
    def has_dropout(self) -> bool:
        """See `ModelConfig`."""
        return self.attention_out_dropout > 0

    pooler_activation = None
    pooling = "mean"  # as in the released models

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

    def mistakes_in_run(self, objective: ObjectiveConfig, *, from_scratch: bool) -> Iterator[str]:
        """See `ModelConfig`."""
        every = self.global_attn_every_n_layers
        if from_scratch and (self.num_layers - 1) % every:
            below = (self.num_layers - 1) // every * every + 1
            yield (
                f"model.num_layers={self.num_layers} with model.global_attn_every_n_layers={every} ends in a local "
                f"layer, and the last must see the whole sequence. Use {below} or {below + every} layers."
            )

    def layers_at(self, depth: float) -> int:
        """See `ModelConfig`; the first and the last layer are global."""
        every = self.global_attn_every_n_layers
        num_layers = self.num_layers * depth
        return 1 + every * _nearest((num_layers - 1) / every) if _nearest(num_layers) else 0

    @property
    def half_window(self) -> int:
        """Keys visible on each side of a query in local layers: distance 64 attends, 65 does not."""
        return self.local_attention // 2

    def is_global(self, layer: int) -> bool:
        return layer % self.global_attn_every_n_layers == 0
