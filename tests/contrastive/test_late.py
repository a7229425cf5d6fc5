"""Late interaction: MaxSim of token vectors against a plain computation and against sentence-transformers; a run of it.

If this breaks, a model that is searched token by token was trained by other scores than those it is searched with.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.batches import lay_out
from modernbert_train.__main__ import read_run
from modernbert_train.batch import Batch
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.config.tools.retrieval import EvaluateConfig
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.planner import BatchPlan
from modernbert_train.evaluate.retrieval.vectors import open_vectors
from modernbert_train.models.build import build_model
from modernbert_train.models.contrastive import Texts, compare, rows_of
from modernbert_train.objectives.contrastive import NEGATIVE, POSITIVE, QUERY
from modernbert_train.train.gradients import gradients, key_dropout
from modernbert_train.weights.gather import load_weights
from modernbert_train.weights.hf_folder import load_weights as load_folder
from tests.support.contrastive_models import CPU, SIZE, columns_in, exported, model_of, ours
from tests.support.front_door import Cli
from tests.support.pairs import ContrastiveRun, make_rows
from tests.support.runs import assert_goes_on_to_the_bit, metrics, weights

LATE = ContrastiveConfig(pooling="late", token_vectors=16)
ROLES_N = torch.tensor([QUERY] * 5 + [POSITIVE] * 5 + [NEGATIVE] * 3)
LENGTHS_N = torch.tensor([3, 5, 2, 7, 4, 9, 4, 12, 3, 6, 20, 1, 5])
# queries 1 and 4 are the same text, and one of the negatives is the positive of query 1
HASHES_N = torch.tensor([1, 2, 3, 4, 2, 11, 12, 13, 14, 15, 21, 12, 22])
QUERIES, DOCUMENTS = range(5), range(5, 13)


def plain(vectors_VW: Tensor, settings: ContrastiveConfig) -> Tensor:
    """losses_Q, text by text."""
    losses_Q = torch.zeros(5)
    widths = (vectors_VW.shape[1], *settings.matryoshka)
    for width in widths:
        texts = F.normalize(vectors_VW[:, :width], dim=1).split(LENGTHS_N.tolist())
        scores = [
            [torch.stack([torch.stack([a @ b for b in other]).max() for a in text]).sum() for other in texts]
            for text in texts
        ]
        losses_Q = losses_Q + torch.stack([loss_of(query, scores, settings) for query in QUERIES]) / len(widths)
    return losses_Q


def loss_of(query: int, scores: list[list[Tensor]], settings: ContrastiveConfig) -> Tensor:
    right = 5 + query

    def loss(others: list[Tensor]) -> Tensor:
        logits = torch.stack([scores[query][right], *others]) / settings.first_temperature
        return logits.logsumexp(0) - logits[0]

    def is_near(a: int, b: int) -> bool:
        means = [float(scores[x][y].detach()) / int(LENGTHS_N[x]) for x, y in ((a, b), (query, right))]
        return settings.margin is not None and means[0] > means[1] + settings.margin

    own = (int(HASHES_N[query]), int(HASHES_N[right]))
    asked = {5 + other: int(HASHES_N[other]) for other in QUERIES}
    wrong = [
        scores[query][each]
        for each in DOCUMENTS
        if int(HASHES_N[each]) not in own and asked.get(each) != own[0] and not is_near(query, each)
    ]
    if not settings.symmetric:
        return loss(wrong)
    others = [
        scores[each][right]
        for each in QUERIES
        if int(HASHES_N[each]) not in own and int(HASHES_N[5 + each]) != own[1] and not is_near(each, right)
    ]
    return (loss(wrong) + loss(others)) / 2


@pytest.mark.runs
@pytest.mark.parametrize("at_once", [1 << 25, 40])
@pytest.mark.parametrize(
    "settings",
    [LATE, replace(LATE, symmetric=True, margin=0.05, temperature=0.3), replace(LATE, matryoshka=(8, 4))],
    ids=["plain", "both directions", "matryoshka"],
)
def test_losses_and_gradients_are_those_of_a_plain_computation(
    settings: ContrastiveConfig, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part and in many; also of the share of a rank."""
    monkeypatch.setattr("modernbert_train.models.contrastive._COSINES", at_once)
    drawn_VW = torch.randn(int(LENGTHS_N.sum()), 16, generator=torch.Generator().manual_seed(3))
    vectors_VW, texts = drawn_VW.clone().requires_grad_(), Texts(ROLES_N, HASHES_N, LENGTHS_N)
    losses_Q = plain(vectors_VW, settings)
    losses_Q.sum().backward()
    found = compare(drawn_VW, texts, slice(0, len(drawn_VW)), settings, backward=True)
    torch.testing.assert_close(found.losses_Q, losses_Q.detach(), atol=1e-5, rtol=1e-5)
    assert found.gradient_VW is not None and vectors_VW.grad is not None
    torch.testing.assert_close(found.gradient_VW, vectors_VW.grad, atol=1e-5, rtol=1e-4)
    shares = [compare(drawn_VW, texts, share, settings, backward=True) for share in (slice(0, 8), slice(8, 100))]
    assert [len(share.losses_Q) for share in shares] == [2, 3]
    both_VW = sum(share.gradient_VW for share in shares if share.gradient_VW is not None)
    torch.testing.assert_close(both_VW, found.gradient_VW, atol=1e-5, rtol=1e-4)


@pytest.mark.runs
def test_loss_and_gradients_equal_sentence_transformers(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path
) -> None:
    """Of a step, the matrix's too; the export has the same."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss

    config = read_run(contrastive_run())
    loss, grads = ours(config, LATE, 2)
    folder = exported(LATE, pairs / "tokenizer", tmp_path / "hf")
    twin = MultiVectorEncoder(str(folder), device="cpu").train()
    scorer: Any = CachedMultiVectorMultipleNegativesRankingLoss(twin, mini_batch_size=7)
    tasks = ("query", "document", "document")
    theirs = scorer([twin.preprocess(column, task=task) for column, task in zip(columns_in(pairs), tasks, strict=True)])
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=2e-5)
    found = {f"model.{name}": each.grad for name, each in twin[0].model.named_parameters() if each.grad is not None}
    found["token_projection.weight"] = twin[1].linear.weight.grad
    for name, grad in grads.items():
        torch.testing.assert_close(grad, found[name], atol=2e-5, rtol=1e-3)

    again, others = ours(config, LATE, 64)
    assert again == pytest.approx(loss, abs=1e-6)
    for name, grad in others.items():
        torch.testing.assert_close(grad, grads[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [LATE, ContrastiveConfig()], ids=["late", "mean"])
def test_both_passes_have_the_same_dropout(settings: ContrastiveConfig) -> None:
    """The gradient belongs to the compared vectors, computed here in one pass."""
    config = replace(SIZE, attention_out_dropout=0.3)
    ids_T = torch.randint(10, 500, (48,), generator=torch.Generator().manual_seed(2))
    targets = {"firsts_P": torch.tensor([0, 20, 8, 30]), "roles_P": torch.tensor([QUERY, QUERY, POSITIVE, POSITIVE])}
    targets |= {"low_P": torch.arange(4), "high_P": torch.zeros(4, dtype=torch.int64)}
    part = Batch(lay_out(ids_T, [0, 8, 20, 30, 48]), targets, {"contrastive": 2})

    plan = BatchPlan("main", 0, 0, (), 1, 48, 1, settings)
    model, twin = model_of(settings, config), model_of(settings, config)
    gradients(model, StepBatch((part,), plan), CPU, 7, 3)
    key_dropout(7, 3, 0, CPU.device)
    vectors_VW = twin.vectors(part).index_select(0, rows_of(part, settings))
    everything = slice(0, len(vectors_VW))
    compared = compare(vectors_VW.detach(), Texts.of(part, settings), everything, settings, backward=True)
    assert compared.gradient_VW is not None
    vectors_VW.backward(compared.gradient_VW / 2)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.runs
def test_a_run_learns_resumes_to_the_bit_and_its_export_scores_alike(
    contrastive_run: ContrastiveRun, tmp_path: Path, cli: Cli
) -> None:
    """sentence-transformers' scores of the exported folder are ours; another run starts from it."""
    from sentence_transformers import MultiVectorEncoder

    words = contrastive_run(
        "model.attention_out_dropout=0.1", "checkpoint.interval_steps=3", "objective.pooling=late",
        "objective.token_vectors=16", "objective.learn_temperature=true", "objective.temperature=0.5",
        "phases.main.batch_rows=4", "phases.main.tokens=12000",
    )  # fmt: skip
    cli("train", *words)
    run = tmp_path / "runs/pairs"
    steps, held_out = metrics(run, "step"), metrics(run, "validation")
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert held_out[-1]["predicted"] == 28 and held_out[-1]["unigram_accuracy"] == pytest.approx(1 / 56)
    assert held_out[-1]["accuracy"] > 0.2 and math.isfinite(held_out[-1]["loss"])
    whole = weights(run)
    assert_goes_on_to_the_bit(words, run)
    assert "28 predictions" in cli("eval", run).out
    cli("export", run)
    assert "MultiVectorEncoder opens it too" in (run / "hf/README.md").read_text()

    stored = load_folder(run / "hf")
    for name in ("token_projection.weight", "model.final_norm.weight"):
        assert torch.equal(stored[name], whole[name])
    theirs = MultiVectorEncoder(str(run / "hf"), device="cpu")
    rows = make_rows(6)
    queries, documents = theirs.encode_query([row["query"] for row in rows]), [row["positive"] for row in rows]
    scores_QC = theirs.similarity(queries, theirs.encode_document(documents))
    model = build_model(read_run(words).model, LATE)
    load_weights(model, stored)

    def vectors(text: str) -> Tensor:
        ids_T = torch.tensor(theirs.tokenizer(text)["input_ids"])
        with torch.no_grad():
            hidden_TD = model.eval().encode(lay_out(ids_T, [0, len(ids_T)]))
            return F.normalize(model.token_projection(hidden_TD), dim=1)  # type: ignore[operator]

    for query, row in enumerate(rows):
        mine = vectors(row["query"])
        expected = torch.stack([(mine @ vectors(other["positive"]).T).max(dim=1).values.sum() for other in rows])
        torch.testing.assert_close(scores_QC[query], expected, atol=1e-5, rtol=1e-5)

    found = open_vectors(str(run), EvaluateConfig(device="cpu"))  # the run itself
    assert found.about.pooling == "none: a vector for each token"
    opened = found.inner.model
    again_QC = opened.similarity(opened.encode_query([row["query"] for row in rows]), opened.encode_document(documents))
    torch.testing.assert_close(again_QC, scores_QC)

    fewer = ("name=again", f"weights.init_from={run / 'hf'}", "phases.main.tokens=2000")
    begin = (*words, *fewer, "phases.main.schedule.warmup_tokens=0")
    said = cli("train", *begin, "objective.token_vectors=8", code=78).err
    assert "Set objective.token_vectors=16" in said
    assert "no token_projection" not in cli("train", *begin).out
