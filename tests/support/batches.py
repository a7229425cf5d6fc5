"""Batches of a small run for tests of the data path, and their rows one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from modernbert_train.batch import IGNORED_LABEL, Batch, Packed
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.facts import read_facts
from modernbert_train.data.loader import PackedLoader, StepBatch
from modernbert_train.data.path import DataPath, open_path
from modernbert_train.objectives import build_objective


class Row(NamedTuple):
    """One row out of a microbatch, so that rows can be compared however they were grouped."""

    input_ids: list[int]
    positions: list[int]
    boundaries: list[int]
    predicted: list[int]
    labels: list[int]


def make_path(config: RunConfig) -> DataPath:
    facts = read_facts(config.data)
    return open_path(
        config.data, config.seed, Clock.of(config), facts, partial(build_objective, vocabulary=facts.vocabulary)
    )


def make_loader(config: RunConfig, rank: int = 0, num_ranks: int = 1, num_workers: int = 0) -> PackedLoader:
    data = replace(config.data, num_workers=num_workers, prefetch_batches=2)
    return make_path(replace(config, data=data)).loader(rank, num_ranks)


def rows_of(step: StepBatch) -> list[Row]:
    rows = []
    for batch in step.microbatches:
        packed, (positions_M, labels_M) = batch.packed, predictions(batch)
        width = len(packed.input_ids_T) // batch.num_rows
        for first in range(0, len(packed.input_ids_T), width):
            mine = (positions_M >= first) & (positions_M < first + width)
            boundaries = {int(b) - first for b in packed.cu_seqlens_S if first <= b <= first + width}
            rows.append(
                Row(
                    packed.input_ids_T[first : first + width].tolist(),
                    packed.position_ids_T[first : first + width].tolist(),
                    sorted(boundaries),
                    (positions_M[mine] - first).tolist(),
                    labels_M[mine].tolist(),
                )
            )
    return rows


def predictions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions and labels, those left out that only pad."""
    positions_M, labels_M = batch.targets["positions_M"], batch.targets["labels_M"]
    real = labels_M != IGNORED_LABEL
    return positions_M[real], labels_M[real]


def same(one: Batch, other: Batch) -> bool:
    """To the last bit, dtypes and all that is no tensor included."""
    pairs = [
        *((getattr(one.packed, field.name), getattr(other.packed, field.name)) for field in fields(Packed)),
        *((getattr(one, name), getattr(other, name)) for name in ("counts", "num_tokens", "num_rows")),
        (list(one.targets), list(other.targets)),
        *zip(one.targets.values(), other.targets.values(), strict=False),
    ]
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )
