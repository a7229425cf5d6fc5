"""An encoder with a head and a decoder tied to its embedding: what predicts tokens, masked ones or the next.

Hidden states are gathered at the predicted positions before the head, which keeps logits, the largest tensor by far, to
those, and in training to a chunk of them at a time.

Shape legend: T packed tokens, M predicted positions (padded), D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from modernbert_train.batch import Batch, Packed, Sums
from modernbert_train.models.encoder import Encoder
from modernbert_train.models.heads import ChunkedLoss, loss_and_gradient, masked_lm_loss_sum
from modernbert_train.models.layers import compute_dtype

POSITIONS, LABELS = "positions_M", "labels_M"  # of the targets, as objectives/mlm.py makes them


class ForMaskedLM(nn.Module):
    """Encoder, head and tied decoder. Fresh weights are meaningless until `models.init.initialize` or a checkpoint.

    Args:
        encoder: of any architecture.
        z_loss: see `masked_lm_loss_sum`.
    """

    def __init__(self, encoder: Encoder, *, z_loss: float = 0.0) -> None:
        super().__init__()
        self.config = encoder.config
        self.model = encoder
        self.z_loss = z_loss
        self.head = encoder.prediction_head()
        embedding_VD = encoder.embedding()
        self.decoder = nn.Linear(embedding_VD.shape[1], embedding_VD.shape[0], bias=True)
        self.decoder.weight = embedding_VD
        self._loss_and_gradient = loss_and_gradient

    def set_phase(self, model: Any) -> None:
        """Go on with the architecture as it is in a phase; before every step."""
        self.config = model
        self.model.set_phase(model)

    def compile_layers(self, **options: Any) -> None:
        """torch.compile each layer, and the loss, in place; parameter names stay. Call it once, before sharding.

        Shapes are static within a phase, whatever the number of documents, so each (kind of layer, train or eval,
        shape) is one graph: first, local and global layers make 6 graphs for each shape, more than dynamo's limit of 8
        allows over a run with several phases.

        Args:
            options: for torch.compile, such as mode="max-autotune-no-cudagraphs".
        """
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for layer in self.model.layers:
            layer.compile(dynamic=False, **options)
        self._loss_and_gradient = torch.compile(loss_and_gradient, dynamic=False, **options)

    def encode(self, packed: Packed) -> Tensor:
        """Final hidden states, hidden_TD, of every token (pad tokens too).

        Under FSDP2 make it an entry first: torch.distributed.fsdp.register_fsdp_forward_method(model, "encode").
        """
        return self.model(packed)

    def logits(self, hidden_TD: Tensor, positions_M: Tensor) -> Tensor:
        """logits_MV at positions of the packed buffer, in the precision of the forward pass."""
        return self.decoder(self._transformed(hidden_TD, positions_M))

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """Sum of the losses of the microbatch's predictions. Nothing is read back from the device.

        Args:
            batch: on the model's device.
            figures: from all logits at once, in the plain way, with the number of hits (`mlm/hits`).

        Returns:
            The sum of the batch's first loss term: masked tokens or the next, the model is the same.

        Raises:
            ConfigError: compute.attention names a kernel that cannot serve this device and precision.
        """
        return self.token_sums(self.encode(batch.packed), batch, figures)

    def token_sums(self, hidden_TD: Tensor, batch: Batch, figures: bool) -> Sums:
        """What `forward` gives, of hidden states that are there already."""
        positions_M, labels_M, term = batch.targets[POSITIONS], batch.targets[LABELS], next(iter(batch.counts))
        hidden_MD = self._transformed(hidden_TD, positions_M)
        if figures:
            logits_MV = self.decoder(hidden_MD)
            loss_sum = masked_lm_loss_sum(logits_MV, labels_M, self.z_loss)
            hits = (logits_MV.argmax(dim=-1) == labels_M).sum()
            return Sums({term: loss_sum}, {f"{term}/hits": hits})
        weight_VD, bias_V = self.decoder.weight, self.decoder.bias
        size = compute_dtype(hidden_MD).itemsize
        chunk = self.config.logit_chunk(on_gpu=hidden_MD.is_cuda, bytes_per_logit=size)
        loss_sum = ChunkedLoss.apply(
            hidden_MD, weight_VD, bias_V, labels_M, self.z_loss, chunk, self._loss_and_gradient
        )
        return Sums({term: loss_sum}, {})

    def _transformed(self, hidden_TD: Tensor, positions_M: Tensor) -> Tensor:
        # index_select: its backward pass adds rows where they belong, that of an index sorts the positions first
        return self.head(hidden_TD.index_select(0, positions_M))
