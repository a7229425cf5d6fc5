"""The architecture of ALBERT, as a variant of `model`: a narrow embedding, and layers that share weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH, ModelConfig
from modernbert_train.core.text import plural

_LAYERS = "model.layers."  # prefix of the parameters of `Encoder.layers`


@dataclass(frozen=True, kw_only=True)
class AlbertConfig(ModelConfig):
    """ALBERT (arXiv 1909.11942). The defaults are ALBERT-base, version 2; the other sizes are in the comments.

    Layers form `groups` of equal length, one after the other. Within a group `group_layers` different layers alternate,
    and `sharing` says which weights the repeats of a layer share. There is no dropout of attention probabilities, see
    `BertConfig`; version 2 was trained without any.
    """

    name: str = "albert"
    vocab_size: int = knob(30000, above=0, high=MAX_WIDTH)  # rows of the embedding, at least the tokenizer's entries
    embedding_size: int = knob(
        128, above=0, high=MAX_WIDTH
    )  # width of the tables, before the projection to hidden_size
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)  # large: 1,024; xlarge: 2,048; xxlarge: 4,096
    # layers that a token passes through, with or without shared weights; large and xlarge: 24
    num_layers: int = knob(12, above=0, high=MAX_LAYERS)
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)  # large and xlarge: 16; xxlarge: 64
    intermediate_size: int = knob(3072, above=0, high=MAX_WIDTH)  # 4 times hidden_size in all
    # attention and feed-forward, each with the norm after it; none: every layer has its own
    sharing: Literal["all", "attention", "ffn", "none"] = "all"
    groups: int = knob(1, above=0, high=MAX_LAYERS)  # layers of different groups share nothing
    group_layers: int = knob(1, above=0, high=MAX_LAYERS)  # different layers of a group, which alternate
    # tokens of the longest sequence, special ones included; each has a learned vector
    max_positions: int = knob(512, above=0, high=MAX_WIDTH)
    segments: int = knob(2, above=0, high=MAX_WIDTH)  # token types: 2 for pairs of texts
    # Google's tanh formula; transformers runs version 1 with the exact one (erf)
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    norm_eps: float = knob(1e-12, above=0)
    # after the embeddings and the attention's projection, in training only; version 1 except xxlarge: 0.1
    dropout: float = knob(0.0, low=0, below=1, phased=True)

    title = "ALBERT", "1909.11942"

    @property
    def details(self) -> str:
        groups = "" if self.sharing == "none" else f", in {plural(self.groups, 'group')}"
        turns = f" of {self.group_layers} alternating layers" if self.group_layers > 1 else ""
        return (
            f"embeddings of width {self.embedding_size}, {self.max_positions:,} learned positions,\n"
            f"  {plural(self.segments, 'segment')}; layers share: {self.sharing}{groups}{turns};\n"
            f"  activation {self.activation}, dropout {self.dropout:g}, none after the feed-forward nor of attention "
            "probabilities"
        )

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    def layers_at(self, depth: float) -> int:
        """See `ModelConfig`; rounded so that every group has the same number of whole turns."""
        turn = self.groups * self.group_layers
        return turn * super().layers_at(depth / turn)

    def weights_of(self, part: Literal["attention", "ffn"]) -> tuple[int, ...]:
        """Return each layer's index among the distinct attentions (or feed-forwards); equal for layers that share."""
        if self.sharing not in ("all", part):
            return tuple(range(self.num_layers))
        length = self.num_layers // self.groups
        turns = [divmod(layer, length) for layer in range(self.num_layers)]
        return tuple(group * self.group_layers + position % self.group_layers for group, position in turns)

    def passes(self, part: Literal["attention", "ffn"]) -> tuple[int, ...]:
        """Return, for each distinct attention (or feed-forward), the number of layers that use it."""
        numbers = self.weights_of(part)
        return tuple(numbers.count(each) for each in range(max(numbers) + 1))

    @property
    def path(self) -> tuple[tuple[int, int], ...]:
        """For each layer, its attention and its feed-forward as indices into `Encoder.layers`."""
        attentions, ffns = self.weights_of("attention"), self.weights_of("ffn")
        return tuple((attention, max(attentions) + 1 + ffn) for attention, ffn in zip(attentions, ffns, strict=True))

    @property
    def unit_passes(self) -> tuple[int, ...]:
        """See `ModelConfig`: attentions, then feed-forwards."""
        return (*self.passes("attention"), *self.passes("ffn"))

    @property
    def stored(self) -> AlbertConfig:
        """See `ModelConfig`: transformers shares whole layers or nothing."""
        if self.sharing == "all":
            return self
        return replace(self, sharing="all", groups=self.num_layers, group_layers=1)

    def stored_names(self, name: str) -> tuple[str, ...]:
        """See `ModelConfig`."""
        if self.stored is self or not name.startswith(_LAYERS):
            return (name,)
        number, _, end = name.removeprefix(_LAYERS).partition(".")
        pairs = zip(chain(*self.path), chain(*self.stored.path), strict=True)
        return tuple(f"{_LAYERS}{stored}.{end}" for here, stored in pairs if here == int(number))

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.sharing == "none" and (self.groups, self.group_layers) != (1, 1):
            yield (
                f"model.sharing=none with model.groups={self.groups} and model.group_layers={self.group_layers}: these "
                "two define which layers share, and none do. Remove them, or set model.sharing=all."
            )
        elif self.num_layers % (self.groups * self.group_layers):
            turn = self.groups * self.group_layers
            near = max(1, round(self.num_layers / turn)) * turn
            yield (
                f"model.num_layers={self.num_layers} is not a multiple of model.groups={self.groups} times "
                f"model.group_layers={self.group_layers}, and each group has equally many layers, in whole turns. Set "
                f"model.num_layers={near}, or other groups."
            )
