"""A masked-LM model that also classifies whether a pair's halves were swapped; see objectives/sop.py.

Shape legend: T packed tokens, P pairs (padded), D model width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import IGNORED_LABEL, Batch, Sums
from modernbert_train.models.encoder import Encoder
from modernbert_train.models.masked_lm import ForMaskedLM

PAIRS, ORDER = "pairs_P", "swapped_P"  # keys of the targets that objectives/sop.py makes


class PairHead(nn.Module):
    """Two classes from the hidden state of a sequence's first token: BERT's pooler (dense, tanh) and a matrix."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.classifier = nn.Linear(hidden_size, 2)

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """Return logits_P2 from the hidden states of [CLS]."""
        return self.classifier(self.dense(hidden_PD).tanh())


class WithOrder(ForMaskedLM):
    """Token prediction and sentence order from one forward pass of the encoder.

    Args:
        encoder: of any architecture.
        z_loss: see `masked_lm_loss_sum`; for tokens only.
    """

    def __init__(self, encoder: Encoder, *, z_loss: float = 0.0) -> None:
        super().__init__(encoder, z_loss=z_loss)
        self.pair_head = PairHead(encoder.config.hidden_size)

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """See `ForMaskedLM`; with `sop`, and its hits."""
        hidden_TD = self.encode(batch.packed)
        tokens = self.token_sums(hidden_TD, batch, figures)
        labels_P = batch.targets[ORDER]
        logits_P2 = self.pair_head(hidden_TD.index_select(0, batch.targets[PAIRS])).float()
        loss = F.cross_entropy(logits_P2, labels_P, ignore_index=IGNORED_LABEL, reduction="sum")
        hits = {"sop/hits": (logits_P2.argmax(dim=-1) == labels_P).sum()} if figures else {}
        return Sums({**tokens.losses, "sop": loss}, {**tokens.figures, **hits})
