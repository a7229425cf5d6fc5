"""The architectures of BERT, RoBERTa, DistilBERT and ESM-2, as variants of `model`.

BERT and RoBERTa are one encoder: RoBERTa lacks the second segment, and its positions start after the padding's.
DistilBERT lacks token types altogether.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from modernbert_train.config.knob import knob
from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH, ModelConfig
from modernbert_train.core.text import plural


@dataclass(frozen=True, kw_only=True)
class BertShape(ModelConfig):
    """Common keys of BERT and DistilBERT. The defaults are BERT-base, uncased."""

    # rows of the embedding, at least the tokenizer's entries; RoBERTa: 50,265
    vocab_size: int = knob(30522, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(768, above=0, high=MAX_WIDTH)  # large: 1,024
    num_layers: int = knob(12, above=0, high=MAX_LAYERS)  # large: 24
    num_heads: int = knob(12, above=0, high=MAX_WIDTH)  # large: 16; heads are 64 wide in both
    # width between the two matrices of the feed-forward; large: 4,096
    intermediate_size: int = knob(3072, above=0, high=MAX_WIDTH)
    # tokens of the longest sequence, special ones included; each has a learned vector
    max_positions: int = knob(512, above=0, high=MAX_WIDTH)
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # exact (erf), as in transformers; or Google's tanh formula
    norm_eps: float = knob(1e-12, above=0)  # RoBERTa: 1e-5
    # after the embeddings, the attention's projection (not in DistilBERT) and the feed-forward, in training only
    dropout: float = knob(0.1, low=0, below=1, phased=True)

    projection_dropout: ClassVar[bool] = True
    """True if dropout follows the attention's projection."""

    @property
    def position_offset(self) -> int:
        """Rows of the position table before the first token's."""
        return 0


@dataclass(frozen=True, kw_only=True)
class BertConfig(BertShape):
    """BERT (arXiv 1810.04805). The defaults are BERT-base, uncased; RoBERTa's (arXiv 1907.11692) are in the comments.

    There is no dropout of attention probabilities, which both were trained with (0.1): no kernel for packed sequences
    can draw it by key, and models since MosaicBERT (arXiv 2312.17482) are trained without it.
    """

    name: str = "bert"
    # token types: 2 for pairs of texts; RoBERTa: 1
    segments: int = knob(2, above=0, high=MAX_WIDTH)
    # rows of the position table before the first token's; RoBERTa: id of [PAD] + 1, which is 2
    position_offset: int = knob(0, low=0, high=MAX_WIDTH)

    @property
    def title(self) -> tuple[str, str | None]:
        return ("RoBERTa", "1907.11692") if self.position_offset else ("BERT", "1810.04805")

    @property
    def model_type(self) -> str:
        return "roberta" if self.position_offset else "bert"

    @property
    def details(self) -> str:
        return (
            f"{self.max_positions:,} learned positions, {plural(self.segments, 'segment')};\n"
            f"  activation {self.activation}, dropout {self.dropout:g}, none of attention probabilities"
        )

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.position_offset > 0 and self.activation != "gelu":
            yield (
                f"model.position_offset={self.position_offset} with model.activation={self.activation}: a position "
                "offset makes it a RoBERTa, which transformers only has with the exact GELU. Set "
                "model.activation=gelu, or model.position_offset=0."
            )

    def mistakes_with(self, tokenizer: str, *, pad_id: int, mask_id: int) -> Iterator[str]:
        """See `ModelConfig`: a RoBERTa's positions."""
        if self.position_offset not in (0, pad_id + 1):
            yield (
                f"model.position_offset={self.position_offset}: the tokenizer in {tokenizer} has [PAD] at {pad_id}, "
                f"and a RoBERTa's positions begin right after it. Set model.position_offset={pad_id + 1}, or 0 for a "
                "BERT."
            )


@dataclass(frozen=True, kw_only=True)
class DistilBertConfig(BertShape):
    """DistilBERT (arXiv 1910.01108): BERT without token types, with half of its layers. The defaults are
    distilbert-base-uncased.

    Published models had dropout of attention probabilities (0.1) and none after the projection; here both are off.
    """

    name: str = "distilbert"
    num_layers: int = knob(6, above=0, high=MAX_LAYERS)
    projection_dropout = False

    pooler_activation = "relu"

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.norm_eps != 1e-12:
            yield f"model.norm_eps={self.norm_eps:g}: transformers' DistilBERT always has 1e-12. Remove it."

    title = "DistilBERT", "1910.01108"

    @property
    def details(self) -> str:
        return (
            f"{self.max_positions:,} learned positions, no token types;\n"
            f"  activation {self.activation}, dropout {self.dropout:g}, none in attention"
        )


@dataclass(frozen=True, kw_only=True)
class EsmConfig(ModelConfig):
    """ESM-2, the encoder of proteins (Lin et al. 2023, 10.1126/science.ade2574). The defaults are the 150M model."""

    name: str = "esm"
    # rows of the embedding, at least the tokenizer's entries; ESM-2's tokenizer: 33
    vocab_size: int = knob(64, above=0, high=MAX_WIDTH)
    hidden_size: int = knob(640, above=0, high=MAX_WIDTH)
    num_layers: int = knob(30, above=0, high=MAX_LAYERS)
    num_heads: int = knob(20, above=0, high=MAX_WIDTH)
    # width between the two matrices of the feed-forward
    intermediate_size: int = knob(2560, above=0, high=MAX_WIDTH)
    rope_theta: float = knob(10_000.0, above=0, phased=True)  # base of the rotary positions
    # masked tokens are zero, and the others are scaled as if 12 % of a sequence were masked, which is the share in
    # training: 80 % of the 15 % of `mask_rate`
    token_dropout: bool = True
    # id of [MASK] for token_dropout; 4 in the tokenizers made here, 32 in ESM-2's
    mask_id: int = knob(4, low=0, high=MAX_WIDTH)
    norm_eps: float = knob(1e-5, above=0)
    init_cutoff: float = knob(3.0, above=0, training=True)  # truncation, in standard deviations

    title = "ESM-2", None
    activation: ClassVar[str] = "gelu"
    projection_dropout: ClassVar[bool] = False
    position_offset: ClassVar[int] = 0

    @property
    def details(self) -> str:
        return f"pre-norm, biases, RoPE base {self.rope_theta:,.0f}, no dropout;\n  token dropout {self.token_dropout}"

    def mistakes(self) -> Iterator[str]:
        """See `ModelConfig`."""
        if self.head_size % 2:
            yield f"model.hidden_size/num_heads={self.head_size}: rotary embeddings turn pairs. Make it even."

    def mistakes_with(self, tokenizer: str, *, pad_id: int, mask_id: int) -> Iterator[str]:
        """See `ModelConfig`: the id for token dropout."""
        if self.mask_id != mask_id:
            here = f"model.mask_id={self.mask_id}: the tokenizer in {tokenizer} has [MASK] at {mask_id}."
            yield f"{here} Set model.mask_id={mask_id}."
