"""The architecture of BERT and RoBERTa, as a variant of `model`; only the standard library is imported.

Both are one encoder: RoBERTa has no second segment, and its positions begin after the padding's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """BERT (arXiv 1810.04805). The defaults are BERT-base, uncased; RoBERTa's (arXiv 1907.11692) stand beside them.

    There is no dropout of attention probabilities, which both were trained with (0.1): no kernel for packed sequences
    can draw it by key, and models since MosaicBERT (arXiv 2312.17482) are trained without.
    """

    name: str = "bert"
    vocab_size: int = 30522  # rows of the embedding, at least the tokenizer's entries; RoBERTa: 50,265
    hidden_size: int = 768  # large: 1,024
    num_layers: int = 12  # large: 24
    num_heads: int = 12  # large: 16; heads are 64 wide in both
    intermediate_size: int = 3072  # width between the two matrices of the feed-forward; large: 4,096
    max_positions: int = 512  # tokens of the longest sequence, special ones included; each has a learned vector
    segments: int = 2  # token types: 2 for pairs of texts; RoBERTa: 1
    position_offset: int = (
        0  # rows of the position table before the first token's; RoBERTa: id of [PAD] + 1, which is 2
    )
    activation: Literal["gelu", "gelu_tanh"] = "gelu"  # exact (erf), as in transformers; or Google's tanh formula
    norm_eps: float = 1e-12  # RoBERTa: 1e-5
    dropout: float = 0.1  # after the embeddings, the attention's projection and the feed-forward, in training only
    init_std: float = 0.02  # truncated normal, the same for all matrices (google-research/bert, modeling.py)
    init_cutoff: float = 2.0  # truncation, in standard deviations

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def logit_chunk(self, *, on_gpu: bool, bytes_per_logit: int) -> int:
        """Predicted positions whose logits exist at the same time in training; as `ModelConfig.logit_chunk`."""
        budget = 1 << 30 if on_gpu else 1 << 26
        return max(1, budget // (self.vocab_size * bytes_per_logit * 128)) * 128
