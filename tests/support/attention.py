"""Inputs of attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.batches import lay_out
from modernbert_train.batch import QUERY_RANK, Packed
from tests.support.encoders import ALBERT


def packed(lengths: list[int], spare: int = 3) -> Packed:
    total = sum(lengths)
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist(), *[total] * spare]
    return lay_out(torch.zeros(total, dtype=torch.int64), boundaries)


def given(lengths: list[int], spare: int = 3) -> Packed:
    """Ranks and limits as an objective may give them: some tokens seen by all, some by some, some by none; the first of
    each sequence sees nothing. Positions are not those in the buffer."""
    line, generator = packed(lengths, spare), torch.Generator().manual_seed(len(lengths))
    ranks_T = torch.randint(-1, 6, (sum(lengths),), generator=generator)
    ranks_T[3::7] = QUERY_RANK
    limits_T = torch.randint(0, 8, (sum(lengths),), generator=generator)
    limits_T[line.cu_seqlens_S[:-1].unique().long().clamp(max=sum(lengths) - 1)] = -1
    positions_T = line.position_ids_T.flip(0) // 2
    return replace(line, order="given", ranks_T=ranks_T, limits_T=limits_T, position_ids_T=positions_T)


WAYS = {
    "all": ALBERT,
    "exact gelu": replace(ALBERT, activation="gelu"),
    "groups": replace(ALBERT, groups=2),
    "turns": replace(ALBERT, group_layers=2),
    "groups and turns": replace(ALBERT, groups=2, group_layers=2, num_layers=8),
    "attention": replace(ALBERT, sharing="attention"),
    "ffn": replace(ALBERT, sharing="ffn"),
    "ffn in groups": replace(ALBERT, sharing="ffn", groups=2),
    "none": replace(ALBERT, sharing="none"),
}
