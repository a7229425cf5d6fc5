"""An encoder with a prediction head and a decoder, usually tied to its embedding; predicts masked or next tokens.

Hidden states are gathered at the predicted positions before the head. That keeps logits, the largest tensor by far, to
these positions, and to one chunk of them at a time.

Shape legend: T packed tokens, M predicted positions (padded), C positions of a chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modernbert_train.batch import WEIGHT_UNIT, Batch, Sums
from modernbert_train.models.casts import Linear
from modernbert_train.models.compiler import region
from modernbert_train.models.encoder import Encoder, OnEncoder
from modernbert_train.models.heads import ChunkedLoss, loss_and_gradient, masked_lm_loss_sum, sample
from modernbert_train.models.layers import compute_dtype
from modernbert_train.models.lookup import take_rows

POSITIONS, LABELS, WEIGHTS = "positions_M", "labels_M", "weights_M"  # keys of the targets of objectives/mlm.py


class ForMaskedLM(OnEncoder):
    """Encoder, head and decoder.

    Args:
        encoder: of any architecture.
        z_loss: see `masked_lm_loss_sum`.
    """

    def __init__(self, encoder: Encoder, *, z_loss: float = 0.0) -> None:
        super().__init__(encoder)
        self.z_loss = z_loss
        self.head = encoder.prediction_head()
        embedding_VD = encoder.embedding()
        self.decoder = Linear(embedding_VD.shape[1], embedding_VD.shape[0], bias=self.config.decoder_bias)
        if self.config.tied:
            self.decoder.weight = embedding_VD
        self._loss_and_gradient = loss_and_gradient

    def compile_heads(self, **options: Any) -> None:
        """See `OnEncoder`; compiles the loss too."""
        super().compile_heads(**options)
        self._loss_and_gradient = torch.compile(loss_and_gradient, dynamic=False, **options)

    def logits(self, hidden_TD: Tensor, positions_M: Tensor) -> Tensor:
        """Return logits_MV at positions of the packed buffer, in the precision of the forward pass."""
        return self.decoder(self.transformed(take_rows(hidden_TD, positions_M)))

    @region
    def transformed(self, hidden_MD: Tensor) -> Tensor:
        """Return the decoder's input from the final hidden states of the predicted tokens."""
        transformed_ME: Tensor = self.head(hidden_MD)
        return transformed_ME

    def forward(self, batch: Batch, figures: bool = False) -> Sums:
        """Return the summed loss of the microbatch's predictions, without a host sync.

        Args:
            batch: on the model's device.
            figures: compute from full logits, and count hits too (`mlm/hits`).

        Returns:
            The sum, named after the batch's first loss term: masked or next tokens use the same model.

        Raises:
            ConfigError: compute.attention names a kernel that does not support this device and precision.
        """
        return self.predict(self.encode(batch.packed, batch.targets[POSITIONS]), batch, figures)[0]

    def token_sums(self, hidden_TD: Tensor, batch: Batch, figures: bool) -> Sums:
        """Return the result of `forward`, from final hidden states of all tokens."""
        return self.predict(take_rows(hidden_TD, batch.targets[POSITIONS]), batch, figures)[0]

    def predict(
        self, hidden_MD: Tensor, batch: Batch, figures: bool, draws_M: Tensor | None = None
    ) -> tuple[Sums, Tensor | None]:
        """Return the result of `forward`, from final hidden states of the predicted tokens.

        With `draws_M`, also return a token for each position, drawn from the prediction there; see `sample`."""
        return self.predicted(self.transformed(hidden_MD), batch, figures, draws_M)

    def predicted(
        self, hidden_MD: Tensor, batch: Batch, figures: bool, draws_M: Tensor | None = None
    ) -> tuple[Sums, Tensor | None]:
        """Return the result of `predict`, from the decoder's input."""
        labels_M, term = batch.targets[LABELS], next(iter(batch.counts))
        chunk = self.logit_chunk(compute_dtype(hidden_MD), on_gpu=hidden_MD.is_cuda)
        weights_M = batch.targets[WEIGHTS].float() / WEIGHT_UNIT if WEIGHTS in batch.targets else None
        if figures:
            return self._plain(hidden_MD, labels_M, weights_M, draws_M, chunk, term)
        weight_VD, bias_V, cast_VD = self.decoder.weight, self.decoder.bias, self.decoder.cast
        loss_sum, sampled_M = ChunkedLoss.apply(
            hidden_MD, weight_VD, bias_V, labels_M, draws_M, self.z_loss, chunk, self._loss_and_gradient, cast_VD,
            weights_M,
        )  # fmt: skip
        return Sums({term: loss_sum}, {}), sampled_M

    def logit_chunk(self, dtype: torch.dtype, *, on_gpu: bool) -> int:
        """Return the number of positions whose logits exist at a time in training."""
        compute, size = self.model.compute, self.config.vocab_size
        return compute.logits_at_once(size, on_gpu=on_gpu, bytes_per_logit=dtype.itemsize)

    def _plain(
        self,
        hidden_MD: Tensor,
        labels_M: Tensor,
        weights_M: Tensor | None,
        draws_M: Tensor | None,
        chunk: int,
        term: str,
    ) -> tuple[Sums, Tensor | None]:
        loss_sum, hits, drawn = [], [], []
        for first in range(0, max(1, len(labels_M)), chunk):
            part = slice(first, first + chunk)
            logits_CV = self.decoder(hidden_MD[part])
            weights_C = None if weights_M is None else weights_M[part]
            loss_sum.append(masked_lm_loss_sum(logits_CV, labels_M[part], self.z_loss, weights_C))
            hits.append((logits_CV.argmax(dim=-1) == labels_M[part]).sum())
            if draws_M is not None:
                drawn.append(sample(_exp(logits_CV), draws_M[part]))
            del logits_CV  # free them before the next chunk's are computed
        sums = Sums({term: sum(loss_sum[1:], loss_sum[0])}, {f"{term}/hits": sum(hits[1:], hits[0])})
        return sums, None if draws_M is None else torch.cat(drawn)


@torch.no_grad()
def _exp(logits_MV: Tensor) -> Tensor:
    logits_MV = logits_MV.float()
    return (logits_MV - logits_MV.amax(dim=-1, keepdim=True)).exp()
