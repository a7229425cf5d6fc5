"""A microbatch of given document lengths, for tests that run the real model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modernbert_train.batch import Batch


def make_batch(lengths: Sequence[int], predicted: int) -> Batch:
    """Documents laid end to end; the first `predicted` tokens are predicted.

    Args:
        lengths: tokens of each document.
        predicted: positions with a label.
    """
    tokens = sum(lengths)
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(
        input_ids_T=torch.zeros(tokens, dtype=torch.int64),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_S=boundaries,
        max_seqlen=max(lengths),
        positions_M=torch.arange(predicted),
        labels_M=torch.zeros(predicted, dtype=torch.int64),
        num_tokens=tokens,
        num_predicted=predicted,
        num_rows=1,
    )
