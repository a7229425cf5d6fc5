"""The masked-LM head's transform, and the loss.

Shape legend: M predicted positions (padded), D model width, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import ModelConfig
from modernbert_train.models.layers import layer_norm


class PredictionHead(nn.Module):
    """norm(gelu(dense(h))), without biases; the decoder that follows is tied to the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = layer_norm(config)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden_MD)))


def masked_lm_loss_sum(logits_MV: Tensor, labels_M: Tensor, z_loss: float) -> Tensor:
    """Sum over the labels that are not IGNORED_LABEL of cross-entropy + z_loss * logsumexp^2, in fp32.

    A sum, so that the caller divides by a count known on the host, and no label at all gives 0 and not 0/0.
    Source of the z-loss: PaLM, arXiv:2204.02311, section 5.
    """
    logits_MV = logits_MV.float()
    total = F.cross_entropy(logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="sum")
    if z_loss:
        squared_M = logits_MV.logsumexp(dim=-1).square()
        total = total + z_loss * squared_M.masked_fill(labels_M == IGNORED_LABEL, 0.0).sum()
    return total
