"""Build microbatches by hand, and evaluate a model on one: for benchmarks of single steps, and for tests.

Shape legend: T packed tokens, S sequences (padded), M predicted positions (padded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modernbert_train.batch import IGNORED_LABEL, Batch, Order, Packed, Sums
from modernbert_train.models.masked_lm import ForMaskedLM


def lay_out(
    ids_T: Tensor, boundaries: Sequence[int] | Tensor, longest: int | None = None, order: Order = "all"
) -> Packed:
    """Return the encoder's input.

    Args:
        ids_T: token ids.
        boundaries: of the sequences, from 0 to T, repeats of T included.
        longest: max_seqlen; None: the longest of these sequences.
        order: which tokens of its sequence a token sees.
    """
    cu_seqlens_S = torch.as_tensor(boundaries, dtype=torch.int32)
    lengths = cu_seqlens_S.diff().long()
    positions_T = torch.arange(len(ids_T)) - cu_seqlens_S[:-1].long().repeat_interleave(lengths, output_size=len(ids_T))
    return Packed(ids_T, positions_T, cu_seqlens_S, int(lengths.max()) if longest is None else longest, order=order)


def mlm_batch(
    packed: Packed,
    positions_M: Tensor,
    labels_M: Tensor | None = None,
    *,
    num_tokens: int | None = None,
    num_rows: int = 1,
) -> Batch:
    """Return a microbatch of masked-language modelling.

    Args:
        packed: the encoder's input.
        positions_M: predicted positions; arbitrary where the label is IGNORED_LABEL.
        labels_M: None: the tokens at these positions.
        num_tokens: tokens that are not padding; None: all.
        num_rows: in the buffer.
    """
    ids_T = packed.input_ids_T
    return Batch(
        packed,
        {"positions_M": positions_M, "labels_M": ids_T[positions_M] if labels_M is None else labels_M},
        {"mlm": len(positions_M) if labels_M is None else int((labels_M != IGNORED_LABEL).sum())},
        len(ids_T) if num_tokens is None else num_tokens,
        num_rows,
    )


def labels_of_line(batch: Batch) -> Tensor:
    """Return labels_T: the label of each token of the packed buffer, IGNORED_LABEL where nothing is predicted."""
    positions_M, labels_M = batch.targets["positions_M"], batch.targets["labels_M"]
    labels_T, real_M = torch.full_like(batch.packed.input_ids_T, IGNORED_LABEL), labels_M != IGNORED_LABEL
    labels_T[positions_M[real_M]] = labels_M[real_M]
    return labels_T


def mean_loss(model: nn.Module, batch: Batch, figures: bool = False) -> Tensor:
    """Return the mean loss of a microbatch's predictions; 0 without predictions."""
    sums: Sums = model(batch, figures=True) if figures else model(batch)
    return sums.losses["mlm"] / max(1, batch.counts["mlm"])


def all_logits(model: ForMaskedLM, batch: Batch) -> Tensor:
    """Return logits_MV at all positions of the targets, padding included."""
    return model.logits(model.encode(batch.packed), batch.targets["positions_M"])
