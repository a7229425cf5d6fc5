"""A teacher's scores of pairs. If this breaks, a model is trained towards other margins than its teacher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main, read_run
from modernbert_train.config.schema import ContrastiveConfig
from modernbert_train.models.contrastive import ForVectors, score_loss_sum
from tests.support.contrastive_models import NUMBER, batch_of, model_of
from tests.support.contrastive_scores import scored, scored_rows  # noqa: F401
from tests.support.runs import metrics

SETTINGS = ContrastiveConfig(score_weight=2.0)


@pytest.mark.runs
def test_the_loss_is_that_of_sentence_transformers(scored: list[str]) -> None:
    """MarginMSELoss with cosines, for the vectors of our own batch: the texts of an example are found again by their
    scores and hashes, and its gradient equals the vectors'."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MarginMSELoss
    from sentence_transformers.util import pairwise_cos_sim

    rows = scored_rows()
    batch, _ = batch_of(read_run(scored), SETTINGS, 64)
    (part,), model = batch.microbatches, model_of(SETTINGS)
    assert isinstance(model, ForVectors)
    assert part.counts == {"contrastive": NUMBER, "score": sum(len(row["negative"]) for row in rows[:NUMBER])}
    vectors_PD = model.vectors(part.to("cpu")).detach().requires_grad_()
    ours = score_loss_sum(vectors_PD, part)
    (ours / part.counts["score"]).backward()

    twin = SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")
    scorer = MarginMSELoss(twin, similarity_fct=pairwise_cos_sim)
    again_PD = vectors_PD.detach().clone().requires_grad_()
    queries, positives, negatives, margins, place = [], [], [], [], 2 * NUMBER
    order = examples_in_order(part)
    for at, example in enumerate(order):
        row = rows[example]
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


def examples_in_order(part: Any) -> list[int]:
    """Numbers of the rows whose queries a microbatch has, in its order, by their hashes."""
    from data_prep.pairs import text_hash

    known = {text_hash(row["query"]): number for number, row in enumerate(scored_rows())}
    low, high, roles = (part.targets[name].long() for name in ("low_P", "high_P", "roles_P"))
    return [known[int(each)] for each in ((high << 31) | low)[roles == 0]]


@pytest.mark.runs
def test_a_run_comes_nearer_to_the_margins(scored: list[str], tmp_path: Path) -> None:
    """In addition to the comparison with all texts; each step has a figure for both."""
    assert main(["train", *scored, "phases.main.tokens=10000"]) == 0
    steps = metrics(tmp_path / "runs/pairs", "step")
    assert (
        steps[-1]["loss/score"] < steps[0]["loss/score"]
        and steps[-1]["loss/contrastive"] < steps[0]["loss/contrastive"]
    )
    assert steps[0]["loss"] == pytest.approx(steps[0]["loss/contrastive"] + 2 * steps[0]["loss/score"], rel=1e-5)
    assert steps[0]["count/score"] > steps[0]["count/contrastive"]
