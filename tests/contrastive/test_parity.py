"""Loss and gradients against sentence-transformers' CachedMultipleNegativesRankingLoss, and against another cut.

If this breaks, a model that was trained here is not the one that the same texts would have made there, or depends on
how much memory there was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import ContrastiveConfig, MaskedLmConfig
from modernbert_train.models.build import build_model
from modernbert_train.weights.hf_folder import export
from tests.support.contrastive_models import SIZE, columns_in, model_of, ours
from tests.support.pairs import ContrastiveRun


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
    theirs = scorer([twin.preprocess(column) for column in columns_in(pairs)], torch.empty(0))
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
