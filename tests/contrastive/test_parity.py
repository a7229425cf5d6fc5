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

from data_prep.pairs import text_hash
from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import ContrastiveConfig, MaskedLmConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.contrastive import ForVectors, score_loss_sum
from modernbert_train.weights.hf_folder import export
from tests.support.contrastive_models import NUMBER, SIZE, batch_of, columns_in, model_of, ours
from tests.support.contrastive_scores import scored_rows
from tests.support.front_door import Cli
from tests.support.pairs import ContrastiveRun
from tests.support.runs import metrics


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
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path,
    settings: ContrastiveConfig, directions: Sequence[str], widths: Sequence[int],
) -> None:  # fmt: skip
    from sentence_transformers import SentenceTransformer, models
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MatryoshkaLoss

    loss, grads = ours(read_run(contrastive_run()), settings, 2)

    state = model_of(settings).state_dict()
    whole = build_model(SIZE, MaskedLmConfig()).state_dict() | state
    whole = {name: tensor for name, tensor in whole.items() if name != "decoder.weight"}
    export(whole, SIZE, max_tokens=64, tokenizer_folder=pairs / "tokenizer", out=tmp_path / "hf", card="")
    encoder = models.Transformer(str(tmp_path / "hf"))
    pooling = models.Pooling(SIZE.hidden_size, pooling_mode=settings.pooling)
    twin = SentenceTransformer(modules=[encoder, pooling], device="cpu")
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
    for name, grad in grads.items():
        torch.testing.assert_close(grad, names[name.removeprefix("model.")].grad, atol=2e-5, rtol=1e-3)


@pytest.mark.runs
def test_a_step_is_the_same_however_it_is_cut(contrastive_run: ContrastiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into microbatches and parts of queries; without dropout, which is keyed by the microbatch."""
    config = read_run(contrastive_run())
    settings = ContrastiveConfig(symmetric=True, margin=0.1, learn_temperature=True)
    loss, whole = ours(config, settings, 64)
    for rows, at_once in ((1, 1 << 25), (3, 1 << 25), (64, 500)):
        monkeypatch.setattr("modernbert_train.models.contrastive._COSINES", at_once)
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


# --- a teacher's scores of pairs ------------------------------------------------------------------------------------


@pytest.mark.runs
def test_the_loss_of_margins_is_that_of_sentence_transformers(scored: list[str]) -> None:
    """MarginMSELoss with cosines, for the vectors of our own batch: the texts of an example are found again by their
    scores and hashes, and its gradient equals the vectors'."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MarginMSELoss
    from sentence_transformers.util import pairwise_cos_sim

    rows, settings = scored_rows(), ContrastiveConfig(score_weight=2.0)
    batch = batch_of(read_run(scored), settings, 64)
    (part,), model = batch.microbatches, model_of(settings)
    assert isinstance(model, ForVectors)
    assert part.counts == {"contrastive": NUMBER, "score": sum(len(row["negative"]) for row in rows[:NUMBER])}
    vectors_PD = model.vectors(part.to("cpu")).detach().requires_grad_()
    ours = score_loss_sum(vectors_PD, part)
    (ours / part.counts["score"]).backward()

    twin = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")
    scorer = MarginMSELoss(twin, similarity_fct=pairwise_cos_sim)
    again_PD = vectors_PD.detach().clone().requires_grad_()
    queries, positives, negatives, margins, place = [], [], [], [], 2 * NUMBER
    for at, row in enumerate(rows_in_order(part)):
        for score in row["wrong"]:
            queries.append(again_PD[at])
            positives.append(again_PD[NUMBER + at])
            negatives.append(again_PD[place])
            margins.append((row["right"] - score) / 10)
            place += 1
    theirs = scorer.compute_loss_from_embeddings(
        [torch.stack(each) for each in (queries, positives, negatives)], torch.tensor(margins)
    )
    theirs.backward()
    assert ours.item() / part.counts["score"] == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(vectors_PD.grad, again_PD.grad, atol=1e-6, rtol=1e-4)


def rows_in_order(part: Any) -> list[dict[str, Any]]:
    """The rows whose queries a microbatch has, in its order, by their hashes."""
    known = {text_hash(row["query"]): row for row in scored_rows()}
    low, high, roles = (part.targets[name].long() for name in ("low_P", "high_P", "roles_P"))
    return [known[int(each)] for each in ((high << 31) | low)[roles == 0]]


@pytest.mark.runs
def test_a_run_comes_nearer_to_the_margins(scored: list[str], tmp_path: Path, cli: Cli) -> None:
    """In addition to the comparison with all texts; each step has a figure for both."""
    cli("train", *scored, "phases.main.tokens=10000")
    steps = metrics(tmp_path / "runs/pairs", "step")
    for name in ("loss/score", "loss/contrastive"):
        assert steps[-1][name] < steps[0][name]
    assert steps[0]["loss"] == pytest.approx(steps[0]["loss/contrastive"] + 2 * steps[0]["loss/score"], rel=1e-5)
    assert steps[0]["count/score"] > steps[0]["count/contrastive"]
