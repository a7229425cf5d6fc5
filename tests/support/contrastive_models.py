"""A contrastive model in our code and in sentence-transformers'."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modernbert_train.clock import Clock
from modernbert_train.config.schema import ContrastiveConfig, ModernBertConfig, RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.packing import GreedyPacker
from modernbert_train.data.path import open_path
from modernbert_train.data.planner import BatchPlan
from modernbert_train.distributed.compute import Compute
from modernbert_train.models.build import build_model
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import initialize
from modernbert_train.objectives import build_objective
from modernbert_train.train.gradients import gradients
from tests.support.pairs import MODEL

CPU = Compute(torch.device("cpu"), "fp32")
NUMBER = 40  # examples
SIZE = ModernBertConfig(**MODEL)  # type: ignore[arg-type]


def batch_of(config: RunConfig, settings: ContrastiveConfig, microbatch_rows: int) -> tuple[StepBatch, list[int]]:
    """The first examples of the training shards as one global batch, and their numbers."""
    facts = check_data(config)
    path = open_path(
        config.data, config.seed, Clock.of(config), facts, partial(build_objective, vocabulary=facts.vocabulary)
    )
    packer = GreedyPacker(256, 128, 1 << 62, 2)
    for document, length in enumerate(path.streams.lengths[:NUMBER]):
        packer.add(0, document, int(length))
    packer.flush()
    rows = tuple(packer.ready)
    plan = BatchPlan("main", 0, 0, rows, len(rows), 256, microbatch_rows, settings)
    return StepBatch(tuple(path.maker.microbatches(rows, plan)), plan), list(range(NUMBER))


def model_of(settings: ContrastiveConfig) -> OnEncoder:
    model = build_model(SIZE, settings)
    initialize(model, model.config, 5)
    return model.train()


def ours(config: RunConfig, settings: ContrastiveConfig, microbatch_rows: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step."""
    model = model_of(settings)
    batch, _ = batch_of(config, settings, microbatch_rows)
    parts = gradients(model, batch, CPU, 1, 0)
    count = sum(part.counts["contrastive"] for part in parts)
    assert count == NUMBER
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sum(float(part.sums["contrastive"]) for part in parts) / count, grads


def held_in(pairs: Path) -> list[dict[str, Any]]:
    """The rows of the training shards, in their order."""
    from data_prep.pairs import text_hash

    rows = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()]
    return [row for row in rows if text_hash(row["query"]) >= 0.1 * (1 << 62)][:NUMBER]
