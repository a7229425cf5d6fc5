"""A contrastive model in our code and in sentence-transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modernbert_train.config.schema import ComputeConfig, ContrastiveConfig, ModernBertConfig, RunConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.packing import GreedyPacker
from modernbert_train.data.planner import BatchPlan
from modernbert_train.distributed.compute import Compute
from modernbert_train.models.build import build_model, shapes_of
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import initialize
from modernbert_train.train.gradients import gradients
from modernbert_train.weights.formats import export_format
from modernbert_train.weights.formats.sentence_encoder import SentenceEncoder
from modernbert_train.weights.hf_folder import export
from tests.support.batches import make_path
from tests.support.pairs import MODEL

CPU = Compute(torch.device("cpu"), "fp32")
NUMBER = 40  # examples
SIZE = ModernBertConfig(**MODEL)  # type: ignore[arg-type]


def batch_of(config: RunConfig, settings: ContrastiveConfig, microbatch_rows: int) -> StepBatch:
    """The first examples of the training shards as one global batch."""
    path = make_path(config)
    packer = GreedyPacker(256, 128, 1 << 62, 2)
    for document, length in enumerate(path.streams.lengths[:NUMBER]):
        packer.add(0, document, int(length))
    packer.flush()
    rows = tuple(packer.ready)
    plan = BatchPlan("main", 0, 0, rows, len(rows), 256, microbatch_rows, settings)
    return StepBatch(tuple(path.maker.microbatches(rows, plan)), plan)


def model_of(
    settings: ContrastiveConfig, size: ModernBertConfig = SIZE, compute: ComputeConfig | None = None
) -> OnEncoder:
    model = build_model(size, settings, compute)
    initialize(model, size, 5)
    return model.train()


def ours(config: RunConfig, settings: ContrastiveConfig, microbatch_rows: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step."""
    model = model_of(settings)
    batch = batch_of(config, settings, microbatch_rows)
    parts = gradients(model, batch, CPU, 1, 0)
    count = sum(part.counts["contrastive"] for part in parts)
    assert count == NUMBER
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return sum(float(part.sums["contrastive"]) for part in parts) / count, grads


def exported(settings: ContrastiveConfig, tokenizer: Path, out: Path) -> Path:
    """The model of the tests' seed as a folder of sentence-transformers."""
    hub, shapes = SentenceEncoder(export_format(SIZE, "all"), settings), shapes_of(SIZE, settings)
    beside: Any = {"max_tokens": 64, "tokenizer_folder": tokenizer, "out": out, "card": ""}
    export(model_of(settings).state_dict(), SIZE, hub=hub, shapes=shapes, **beside)
    return out


def columns_in(pairs: Path) -> list[list[str]]:
    """Queries, positives and first negatives of the training shards, in their order."""
    from data_prep.pairs import text_hash

    rows = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()]
    rows = [row for row in rows if text_hash(row["query"]) >= 0.1 * (1 << 62)][:NUMBER]
    return [[row["query"] for row in rows], [row["positive"] for row in rows], [row["negative"][0] for row in rows]]
