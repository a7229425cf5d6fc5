"""A model and its teacher. If this breaks, a student is trained towards something other than the teacher's output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modernbert_train.batch import Batch
from modernbert_train.config.distill import DistillConfig
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModelConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.distilled import TOKENS, Distilled, Teacher
from modernbert_train.models.masked_lm import ForMaskedLM
from tests.support.encoder_training import pack, sequences
from tests.support.encoders import BERT, ENCODERS, MODERNBERT, fill

STUDENT = replace(ENCODERS["distilbert"], num_layers=2)
TEACHERS: dict[str, ModelConfig] = {
    "bert": replace(BERT, num_layers=4, dropout=0.1),
    "wider": replace(MODERNBERT, hidden_size=128, num_layers=2, num_heads=4, attention_out_dropout=0.1),
}


def made(config: ModelConfig, objective: MaskedLmConfig, **compute: Any) -> Any:
    model = build_model(config, objective, ComputeConfig(attention="sdpa", **compute))
    fill(model, config)  # type: ignore[arg-type]
    return model


def batch_of(terms: list[str]) -> tuple[Batch, list[Tensor]]:
    """Two rows, each with a tail of pads."""
    apart = sequences([30, 9, 40])
    batch = pack([apart[:2], apart[2:]], row_tokens=45, spare=3)
    marks_T = torch.zeros(90, dtype=torch.int64)
    marks_T[:39], marks_T[45:85] = 1, 1
    known = dict.fromkeys(("mlm", "kl"), batch.counts["mlm"]) | {"cosine": 79, "mse": 79, "pooled": 3}
    counts = {term: known[term] for term in terms}
    return replace(batch, targets={**batch.targets, TOKENS: marks_T}, counts=counts), apart


@pytest.mark.parametrize("name", TEACHERS)
def test_the_loss_is_the_published_one(name: str) -> None:
    """DistilBERT's: KL of softened predictions times T^2, masked tokens, cosine of hidden states; and two others.

    From whole logits of each sequence alone by torch's own losses, values and gradients of all weights.
    """
    width = TEACHERS[name].hidden_size
    objective = DistillConfig(
        teacher="x", mse_weight=0.7, pooled_weight=0.6, temperature=3.0, teacher_width=None if width == 64 else width
    )
    model = made(STUDENT, objective, logit_chunk=8).train()
    whole = made(TEACHERS[name], MaskedLmConfig()).train()  # it has dropout, which a teacher must not draw
    plain = made(STUDENT, objective).train()
    assert isinstance(model, Distilled) and isinstance(whole, ForMaskedLM)
    model.listen(Teacher(whole, bf16=False))
    batch, apart = batch_of(["mlm", "kl", "cosine", "mse", "pooled"])
    sums = model(batch)
    loss = sum(objective.terms[term] * sums.losses[term] / batch.counts[term] for term in objective.terms)
    loss.backward()

    ours_NV, theirs_NV, labels_N, ours_ND, theirs_ND = [], [], [], [], []
    for ids in apart:
        one = pack([[ids]], row_tokens=len(ids))
        at = torch.arange(0, len(ids), 3)
        hidden, teacher = plain.encode(one.packed), whole.encode(one.packed)
        ours_NV.append(plain.logits(hidden, at))
        theirs_NV.append(whole.logits(teacher, at))
        labels_N.append(ids[::3])
        ours_ND.append(plain.projection(hidden) if width != 64 else hidden)
        theirs_ND.append(teacher)
    pooled = (ours_ND, [each.detach() for each in theirs_ND])
    ours, theirs, a, b = (torch.cat(each) for each in (ours_NV, theirs_NV, ours_ND, theirs_ND))
    expected = {
        "mlm": F.cross_entropy(ours, torch.cat(labels_N)),
        "kl": 9 * nn.KLDivLoss(reduction="batchmean")((ours / 3).log_softmax(-1), (theirs.detach() / 3).softmax(-1)),
        "cosine": nn.CosineEmbeddingLoss()(a, b.detach(), torch.ones(len(a))),
        "mse": F.mse_loss(a, b.detach()),
        "pooled": 1 - F.cosine_similarity(*(torch.stack([s.mean(0) for s in each]) for each in pooled)).mean(),
    }
    for term, value in expected.items():
        torch.testing.assert_close(sums.losses[term] / batch.counts[term], value, atol=1e-5, rtol=1e-5)
    sum(objective.terms[term] * value for term, value in expected.items()).backward()
    for (key, ours_p), theirs_p in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours_p.grad - theirs_p.grad).norm() <= 1e-4 * theirs_p.grad.norm() + 1e-6, key
    assert all(parameter.grad is None for parameter in whole.parameters())
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names if name.startswith("projection")} == (
        set() if width == 64 else {"projection.weight", "projection.bias"}
    )
    assert not any("teacher" in name for name in names)


def test_held_out_text_needs_no_teacher() -> None:
    """`eval`, and any reader of a checkpoint, may lack it."""
    model = made(STUDENT, DistillConfig(teacher="x")).eval()
    batch, _ = batch_of(["mlm"])
    assert model(batch, figures=True).losses.keys() == {"mlm"}
    assert DistillConfig(teacher="x", mask_rate=0.4).for_validation() == MaskedLmConfig().for_validation()


def step(model: Any, batch: Batch, bf16: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses, and gradients of their weighted sum."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        losses = model(batch).losses
    terms = model.objective.terms
    sum(terms[term] * losses[term] / batch.counts[term] for term in terms).backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {term: loss.detach() for term, loss in losses.items()}, grads


ALL = DistillConfig(teacher="x", mse_weight=0.5, pooled_weight=0.5, teacher_width=128)


def taught(*, bf16: bool = False, compiled: bool = False) -> Any:
    """A student under the wider teacher; compiled as a run does it, but for the code that is generated."""
    model = made(STUDENT, ALL, logit_chunk=16).train()
    teacher = Teacher(made(TEACHERS["wider"], MaskedLmConfig()), bf16=bf16)
    model.listen(teacher)
    if compiled:
        for each in (model, teacher.model):
            each.compile_layers(backend="aot_eager")
    return model


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.parametrize(
    "bf16", [pytest.param(False, id="fp32"), pytest.param(True, id="bf16", marks=pytest.mark.slow)]
)
def test_compiled_it_takes_the_same_step(bf16: bool) -> None:
    """Layers of both, the loss and the divergence; and the second step compiles nothing again."""
    batch, _ = batch_of([*ALL.terms])
    plain, model = taught(bf16=bf16), taught(bf16=bf16, compiled=True)
    (losses, grads), (ours, own) = step(plain, batch, bf16), step(model, batch, bf16)
    close = {"rtol": 2e-2, "atol": 2e-3} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    for term, loss in losses.items():
        torch.testing.assert_close(ours[term], loss, **close, msg=term)
    for name, grad in grads.items():
        assert (own[name] - grad).norm() <= close["rtol"] * grad.norm() + close["atol"], name
    with torch.compiler.set_stance("fail_on_recompile"):
        step(model, batch, bf16)


def test_a_step_in_bf16_is_near_that_in_fp32() -> None:
    """Student and teacher, every term."""
    batch, _ = batch_of([*ALL.terms])
    (precise, grads), (rough, own) = step(taught(), batch), step(taught(bf16=True), batch, bf16=True)
    for term, loss in precise.items():
        torch.testing.assert_close(rough[term], loss, rtol=0.03, atol=0.05, msg=term)
    whole, apart = (torch.cat([each.flatten() for each in found]) for found in (
        grads.values(), [own[name] - grad for name, grad in grads.items()]))  # fmt: skip
    assert apart.norm() < 0.1 * whole.norm()
