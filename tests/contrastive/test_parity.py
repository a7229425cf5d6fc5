"""Loss and gradients against sentence-transformers' CachedMultipleNegativesRankingLoss, and against another cut.

If this breaks, a model that was trained here is not the one that the same texts would have made there, or depends on
how much memory there was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.__main__ import read_run
from modernbert_train.clock import Clock
from modernbert_train.config.schema import ContrastiveConfig, MaskedLmConfig, ModernBertConfig, RunConfig
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
from modernbert_train.weights.hf_folder import export
from tests.contrastive.conftest import MODEL, ContrastiveRun

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


@pytest.mark.runs
@pytest.mark.parametrize(
    ("settings", "directions", "widths"),
    [
        (ContrastiveConfig(), ("query_to_doc",), ()),
        (ContrastiveConfig(symmetric=True, temperature=0.1), ("query_to_doc", "doc_to_query"), ()),
        (ContrastiveConfig(matryoshka=(16, 8), pooling="cls"), ("query_to_doc",), (32, 16, 8)),
    ],
    ids=["plain", "symmetric", "matryoshka of [CLS]"],
)
def test_loss_and_gradients_equal_sentence_transformers(
    contrastive_run: ContrastiveRun,
    pairs: Path,
    tmp_path: Path,
    settings: ContrastiveConfig,
    directions: Sequence[str],
    widths: Sequence[int],
) -> None:
    from sentence_transformers import SentenceTransformer, models
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss

    loss, grads = ours(read_run(contrastive_run()), settings, 2)

    state = model_of(settings).state_dict()
    whole = build_model(SIZE, MaskedLmConfig()).state_dict() | state
    whole = {name: tensor for name, tensor in whole.items() if name != "decoder.weight"}
    export(whole, SIZE, max_tokens=64, tokenizer_folder=pairs / "tokenizer", out=tmp_path / "hf", card="")
    encoder = models.Transformer(str(tmp_path / "hf"))
    twin = SentenceTransformer(
        modules=[encoder, models.Pooling(SIZE.hidden_size, pooling_mode=settings.pooling)], device="cpu"
    )
    scorer: Any = CachedMultipleNegativesRankingLoss(
        twin, scale=1 / settings.first_temperature, mini_batch_size=7, directions=tuple(directions),
        partition_mode="per_direction",
    )  # fmt: skip
    if widths:
        scorer = MatryoshkaLoss(twin, scorer, list(widths), matryoshka_weights=[1 / len(widths)] * len(widths))
    rows = held_in(pairs)
    columns = [[row["query"] for row in rows], [row["positive"] for row in rows], [row["negative"][0] for row in rows]]
    theirs = scorer([twin.preprocess(column) for column in columns], torch.empty(0))
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=2e-5)
    names = dict(encoder.auto_model.named_parameters())
    compared = 0
    for name, grad in grads.items():
        other = names.get(name.removeprefix("model."))
        if other is not None and other.grad is not None:
            torch.testing.assert_close(grad, other.grad, atol=2e-5, rtol=1e-3)
            compared += 1
    assert compared == len(grads)


@pytest.mark.runs
def test_a_step_is_the_same_however_it_is_cut(contrastive_run: ContrastiveRun) -> None:
    """Without dropout, which is keyed by the microbatch."""
    config = read_run(contrastive_run())
    settings = ContrastiveConfig(symmetric=True, margin=0.1, learn_temperature=True)
    loss, whole = ours(config, settings, 64)
    for rows in (1, 3):
        other, grads = ours(config, settings, rows)
        assert other == pytest.approx(loss, abs=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole[name], atol=1e-6, rtol=1e-4)


@pytest.mark.runs
def test_the_gradient_of_the_temperature_is_that_of_the_whole_loss(
    contrastive_run: ContrastiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the difference of two losses at slightly different temperatures, from microbatches and parts of queries."""
    config, settings = read_run(contrastive_run()), ContrastiveConfig(temperature=0.1, learn_temperature=True)
    monkeypatch.setattr("modernbert_train.models.contrastive._COSINES", 500)
    _, grads = ours(config, settings, 1)
    step = 0.01
    one, other = (ours(config, replace(settings, temperature=0.1 * math.exp(-sign * step)), 64)[0] for sign in (1, -1))
    assert float(grads["log_scale.bias"]) == pytest.approx((one - other) / (2 * step), rel=1e-3)
