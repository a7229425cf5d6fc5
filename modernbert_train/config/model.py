"""The architecture: keys of every encoder. An encoder is another file in this folder and a row in
schema.VARIANTS. Keys that a phase may change are marked `phased`; all others determine the weights' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from omegaconf import MISSING

from modernbert_train.config.knob import architecture_keys, knob

# Beyond every known model; larger numbers in an untrusted file would build layers, or fill memory, without end.
MOST_LAYERS = 1_000
MOST_WIDTH = 1 << 24
CLASSIFIER_WEIGHT, POOLER_WEIGHT = "classifier.weight", "pooler.dense.weight"  # initialized by a fine-tuning


# for a whole sequence, or for each pair of tokens, from tables that grow with the tokens
Bias = Literal["sequences", "pairs"]
TILE_HEADS = (16, 32, 64, 128)  # widths of heads that the attention kernel tiles supports
CUDNN_HEADS = range(8, 129, 8)  # of the attention kernel cudnn, whose backward pass supports no wider ones


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Keys of every encoder."""

    name: str = MISSING
    vocab_size: int = knob(above=0, high=MOST_WIDTH)
    hidden_size: int = knob(above=0, high=MOST_WIDTH)
    num_layers: int = knob(above=0, high=MOST_LAYERS)
    num_heads: int = knob(above=0, high=MOST_WIDTH)
    intermediate_size: int = knob(above=0, high=MOST_WIDTH)
    norm_eps: float = knob(above=0)
    init_std: float = knob(above=0, training=True)
    init_cutoff: float = knob(above=0, training=True)

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

    @property
    def pooling(self) -> Literal["cls", "mean"]:
        """The usual pooling of a classifier, which can be exported."""
        return "cls"

    @property
    def model_type(self) -> str:
        """The name in transformers."""
        return self.name

    own_code: ClassVar[bool] = False
    """True if transformers lacks a class of it, and fetches code if a user allows that."""

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
    def position_offset(self) -> int:
        """Rows of the position table before the first token's."""
        return 0

    @property
    def mask_id(self) -> int | None:
        """Id of [MASK] in the tokenizer, if the encoder reads masked tokens differently."""
        return None

    @property
    def segments(self) -> int:
        """Token types; 0: none."""
        return 0

    @property
    def convolution(self) -> int:
        """Tokens that a convolution spans, including the next one; 0: no convolution."""
        return 0

    @property
    def dropout(self) -> float:
        """Dropout before the classes of a fine-tuning, as in transformers' classes."""
        return 0.0

    @property
    def embedding_width(self) -> int:
        """Numbers in a token's row of the embedding."""
        return self.hidden_size

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
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
        """The same function in the form of other libraries' files: itself, or a model that shares less."""
        return self

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the parameters of `stored` that equal a parameter: itself, or several."""
        return (name,)

    score_bias: ClassVar[Bias | None] = None
    """The form of the bias that is added to attention scores, which few kernels support; None: no bias."""

    token_head_vectors: ClassVar[int] = 1
    """Vectors of the model's width in the replaced-token head: a bias or a norm's weight."""

    key_products: ClassVar[int] = 2
    """Products of the model's width for each pair of tokens in attention: score, weighted sum."""

    def mistakes(self) -> Iterator[str]:
        """Yield a message for each impossible combination of keys, for `check`; every number is within its bounds."""
        yield from ()

    def mistakes_from_scratch(self) -> Iterator[str]:
        """Yield a message for each setting that an existing model may have but a new one should not."""
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
        heads = nearest(self.num_heads * width)
        hidden = heads * self.head_size
        return replace(
            self,
            num_layers=self.layers_at(depth),
            num_heads=heads,
            hidden_size=hidden,
            intermediate_size=nearest(self.intermediate_size * hidden / self.hidden_size),
        )

    def layers_at(self, depth: float) -> int:
        """Return a fraction of the layers, rounded."""
        return nearest(self.num_layers * depth)

    def logit_chunk(self, *, on_gpu: bool, bytes_per_logit: int) -> int:
        """Return the number of predicted positions whose logits exist at the same time in training: enough for
        efficient products. `compute.logit_chunk` overrides it."""
        budget = 1 << 30 if on_gpu else 1 << 26
        return max(1, budget // (self.vocab_size * bytes_per_logit * 128)) * 128


def nearest(number: float) -> int:
    return math.floor(number + 0.5)
