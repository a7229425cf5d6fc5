"""Sparse vectors (SPLADE) against a plain computation and sentence-transformers; a run of them, and its export.

If this breaks, a model that is searched by an inverted index was trained by other scores than those it is searched
with, or its vectors are not sparse.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_prep.pairs import text_hash
from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import ComputeConfig, ContrastiveConfig
from modernbert_train.models.sparse import SparseVectors
from modernbert_train.train.gradients import gradients
from modernbert_train.weights.hf_folder import load_weights as load_folder
from tests.support.contrastive_models import CPU, SIZE, batch_of, columns_in, exported, model_of
from tests.support.contrastive_scores import scored_rows
from tests.support.front_door import Cli
from tests.support.pairs import SPARSE_RUN, ContrastiveRun, make_rows
from tests.support.runs import assert_goes_on_to_the_bit, metrics, weights

SPARSE = ContrastiveConfig(pooling="sparse", query_flops=0.03, document_flops=0.02)
BOUNDARIES_S = torch.tensor([0, 3, 4, 11, 20, 24, 24, 24])  # the last segment of text is the row's padding


@pytest.mark.parametrize("columns", [1, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_and_gradients_are_those_of_a_plain_computation(columns: int, dtype: torch.dtype) -> None:
    """For any number of columns at a time; in bf16 equal logits are frequent, and one token of them gets the slope."""
    draw = torch.Generator().manual_seed(3)
    firsts_N = torch.tensor([11, 0, 4])
    leaves = [torch.randn(size, generator=draw).requires_grad_() for size in ((24, 5), (16, 5), (16,))]
    slopes_NV = torch.randn(3, 16, generator=draw)

    def plain(hidden_TE: Tensor, weight_VE: Tensor, bias_V: Tensor) -> Tensor:
        logits_TV = torch.nn.functional.linear(*(each.to(dtype) for each in (hidden_TE, weight_VE, bias_V))).float()
        texts = [logits_TV[first:end] for first, end in ((11, 20), (0, 3), (4, 11))]
        return torch.stack([text.relu().log1p().max(dim=0).values for text in texts])

    expected_NV = plain(*leaves)
    expected = torch.autograd.grad((expected_NV * slopes_NV).sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found_NV = SparseVectors.apply(*leaves, BOUNDARIES_S, firsts_N, columns)
    found = torch.autograd.grad((found_NV * slopes_NV).sum(), leaves)
    assert 0 < (expected_NV == 0).sum() < expected_NV.numel() / 2
    exact = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    for one, other in zip((found_NV, *found), (expected_NV, *expected), strict=True):
        torch.testing.assert_close(one, other, **exact)


def step(config: Any, settings: ContrastiveConfig, rows: int, logit_chunk: int | None = None) -> tuple[float, Any]:
    """Loss of all terms, and gradients, of the first examples."""
    model = model_of(settings, SIZE, ComputeConfig(logit_chunk=logit_chunk))
    parts = gradients(model, batch_of(config, settings, rows), CPU, 1, 0)
    counts = {term: sum(part.counts[term] for part in parts) for term in settings.terms}
    losses = {term: sum(float(part.sums[term]) for part in parts) / counts[term] for term in settings.terms}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return sum(weight * losses[term] for term, weight in settings.terms.items()), grads


def assert_same_gradients(grads: dict[str, Tensor], twin: Any) -> None:
    theirs = twin[0].model
    for name, grad in grads.items():
        module, _, rest = name.partition(".")
        other = theirs.get_submodule(module).get_parameter(rest).grad
        torch.testing.assert_close(grad, other, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.runs
def test_loss_and_gradients_equal_sentence_transformers(
    contrastive_run: ContrastiveRun, pairs: Path, tmp_path: Path
) -> None:
    """SpladeLoss over the whole batch; ours in microbatches of 2 rows or of all, by few or all logits at a time."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    config = read_run(contrastive_run())
    twin = SparseEncoder(str(exported(SPARSE, pairs / "tokenizer", tmp_path / "hf")), device="cpu").train()
    scorer: Any = SpladeLoss(twin, SparseMultipleNegativesRankingLoss(twin), 0.02, 0.03)
    theirs = scorer([twin.preprocess(column) for column in columns_in(pairs)], torch.empty(0))
    assert theirs["document_regularizer_loss"] > 0.01 and theirs["query_regularizer_loss"] > 0.01
    total = sum(theirs.values())
    total.backward()
    for microbatch_rows, logit_chunk in ((2, None), (2, 20), (64, 200)):
        loss, grads = step(config, SPARSE, microbatch_rows, logit_chunk)
        assert loss == pytest.approx(total.item(), abs=2e-5)
        assert_same_gradients(grads, twin)


@pytest.mark.runs
def test_margins_of_a_teacher_equal_sentence_transformers(scored: list[str], pairs: Path, tmp_path: Path) -> None:
    """SparseMarginMSELoss by dot product, with the teacher's own margins: scores from -5 to 5 are 10 wide."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.losses import SparseMarginMSELoss

    settings = replace(SPARSE, score_weight=2.0, score_scale=10.0)
    batch = batch_of(read_run(scored), settings, 64)
    parts = gradients(model_of(settings), batch, CPU, 1, 0)
    twin = SparseEncoder(str(exported(settings, pairs / "tokenizer", tmp_path / "hf")), device="cpu")
    flat = [
        (row, text, score)
        for row in scored_rows()[:40]
        for text, score in zip(row["negative"], row["wrong"], strict=True)
    ]
    columns = [[row["query"] for row, *_ in flat], [row["positive"] for row, *_ in flat], [text for _, text, _ in flat]]
    found = [twin.encode(column, convert_to_sparse_tensor=False) for column in columns]
    margins = torch.tensor([float(row["right"] - score) for row, _, score in flat])
    expected = SparseMarginMSELoss(twin).compute_loss_from_embeddings(found, margins)
    assert sum(part.counts["score"] for part in parts) == len(flat)
    assert sum(float(part.sums["score"]) for part in parts) / len(flat) == pytest.approx(float(expected), rel=1e-5)


def answers(row: dict[str, Any]) -> list[str]:
    return [row["positive"], *row["negative"]]


@pytest.mark.runs
def test_a_run_learns_resumes_to_the_bit_and_its_export_has_the_same_vectors(
    contrastive_run: ContrastiveRun, tmp_path: Path, cli: Cli
) -> None:
    """As sentence-transformers' SparseEncoder; its weights begin another run, and a run of masked tokens."""
    from sentence_transformers import SparseEncoder

    words = contrastive_run("checkpoint.interval_steps=3", "model.attention_out_dropout=0.1", *SPARSE_RUN)
    cli("train", *words)
    run = tmp_path / "runs/pairs"
    steps, held_out = metrics(run, "step"), metrics(run, "validation")
    assert steps[-1]["loss/contrastive"] < 0.8 * steps[0]["loss/contrastive"]
    assert steps[0]["loss/flops"] == 0 < steps[1]["loss/flops"], "the weights grow from 0"
    assert steps[0]["count/flops"] == 3 * steps[0]["count/contrastive"]
    assert held_out[-1]["accuracy"] > 0.5 and math.isfinite(held_out[-1]["loss"])
    whole = weights(run)
    assert_goes_on_to_the_bit(words, run)
    cli("export", run)
    assert "SparseEncoder opens it too" in (run / "hf/README.md").read_text()
    stored = load_folder(run / "hf")
    assert all(torch.equal(stored[name], whole[name]) for name in ("head.dense.weight", "decoder.bias"))

    theirs = SparseEncoder(str(run / "hf"), device="cpu")
    texts = [row[key] for row in make_rows(6) for key in ("query", "positive")]
    found_NV = theirs.encode(texts, convert_to_sparse_tensor=False)
    from transformers import AutoModelForMaskedLM

    plain = AutoModelForMaskedLM.from_pretrained(run / "hf")
    for text, found_V in zip(texts, found_NV, strict=True):
        with torch.no_grad():
            logits_TV = plain(**theirs.tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(found_V, logits_TV.relu().log1p().amax(dim=0), atol=1e-5, rtol=1e-5)
    assert 5 < held_out[-1]["flops/document_terms"] < 250, "of 512; at first of half"
    rows = [row for row in make_rows(240) if text_hash(row["query"]) < 0.1 * (1 << 62)]
    columns = {"query": [row["query"] for row in rows], "document": [text for row in rows for text in answers(row)]}
    for name, column in columns.items():
        terms_N = (theirs.encode(column, convert_to_sparse_tensor=False) > 0).sum(dim=1)
        assert held_out[-1][f"flops/{name}_terms"] == pytest.approx(terms_N.double().mean().item())

    begin = ("phases.main.schedule.warmup_tokens=0", f"weights.init_from={run / 'hf'}", "phases.main.tokens=2000")
    others = [word for word in words if not word.startswith("objective.")]
    for again in ([*words, "name=again"], [*others, "name=masked", "objective={name: mlm}"]):
        assert "drawn" not in cli("train", *again, *begin).out
