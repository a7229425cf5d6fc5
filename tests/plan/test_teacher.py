"""A teacher in a plan. If this breaks, a run's predicted time is 40 % too low."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import BertConfig, ComputeConfig, DistillConfig, MaskedLmConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.distilled import TOKENS, Distilled, Teacher
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import Spans, flops_per_token, mean_spans
from modernbert_train.plan.make import Plan, make_plan
from modernbert_train.plan.sections import sections
from modernbert_train.plan.teacher_cost import teacher_bytes, teacher_flops
from tests.support.kept_memory import SMALL, Attend, autocast, running_total, use_kernel
from tests.support.plan_batches import counting_flops, make_batch

RECIPE = Path(__file__).parents[2] / "yamls/recipes/distilbert.yaml"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Write the files of bert-base-uncased that a plan reads."""
    about = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    return tmp_path


def printed(plan: Plan) -> Any:
    """Return what a plan says of the teacher."""
    (found,) = (each for each in sections(plan, "h100", ["h100"], {}) if each.title == "Teacher")
    return found


def test_a_teacher_goes_forward_once(bert: Path) -> None:
    """Its predictions are counted where they are compared: for every masked token."""
    config = load_run([RECIPE], [f"objective.teacher={bert}"])
    (phase,) = make_plan(config, 1).phases
    share = 0.15 * (1 - 2 / 512)
    alone = flops_per_token(census(BertConfig()), Spans(512, 0), {"tokens": share}).forward
    assert phase.flops.teacher == pytest.approx(alone)
    assert phase.flops.training == pytest.approx(3 * phase.flops.forward + alone)
    assert 1.9 < alone / phase.flops.forward < 2.0, "twice the layers, and the same head"
    states = replace(config.objective, kl_weight=0.0)
    assert teacher_flops(states, Spans(512, 0), {"tokens": share, "cosine": 1.0}) < alone
    assert printed(make_plan(config, 1)).rows[1][:3] == ("main", "0.1959", "39.1 %")


def test_one_that_is_not_here_is_not_counted_and_that_is_reported() -> None:
    plan = make_plan(load_run([RECIPE]), 1)
    assert plan.phases[0].flops.teacher == 0
    assert printed(plan).notes == [
        "google-bert/bert-base-uncased is in no folder here: neither its FLOPs nor its memory are counted."
    ]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_memory_of_its_weights_is_what_they_take(bert: Path, bf16: bool) -> None:
    """As models/distilled.py stores them."""
    objective = DistillConfig(teacher=str(bert))
    small = BertConfig(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=96, vocab_size=1000)
    about = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    file = bert / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | about | {"vocab_size": 1000}))
    model = build_model(small, MaskedLmConfig(), ComputeConfig())
    teacher = Teacher(model, bf16=bf16)
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    decoder = teacher._decoder_VE
    assert decoder is not None
    held += decoder.numel() * decoder.element_size() if decoder.dtype == torch.bfloat16 else 0
    assert teacher_bytes(objective, bf16=bf16, tokens=0, chunk=0) == held


def test_the_flops_of_a_step_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The student three times, its teacher once, with a matrix to the teacher's width for the states of all tokens. The
    divergence recomputes the student's logits in chunks, with the products of its gradient: that does not belong to the
    model, and the test adds it."""
    size = {"vocab_size": 512, "num_heads": 2, "intermediate_size": 48, "dropout": 0.0}
    student, teacher = (
        BertConfig(**size, hidden_size=32, num_layers=2),
        BertConfig(**size, hidden_size=64, num_layers=4),
    )
    monkeypatch.setattr("modernbert_train.weights.names.architecture_of", lambda name: teacher)
    objective, lengths, predicted = DistillConfig(teacher="x", teacher_width=64, mse_weight=0.5), [33, 7, 100], 40
    tokens, batch = sum(lengths), make_batch(lengths, predicted)
    counts = {"mlm": predicted, "kl": predicted, "cosine": tokens, "mse": tokens}
    batch = replace(batch, targets={**batch.targets, TOKENS: torch.ones(tokens, dtype=torch.long)}, counts=counts)
    model = build_model(student, objective)
    assert isinstance(model, Distilled)
    model.listen(Teacher(build_model(teacher, MaskedLmConfig()), bf16=False))
    with counting_flops() as counted:
        sum(model(batch).losses.values()).backward()  # type: ignore[union-attr]

    uses = {"tokens": predicted / tokens, "kl": predicted / tokens, "cosine": 1.0, "mse": 1.0}
    own, theirs = census(student, objective), census(teacher)
    flops = flops_per_token(own, mean_spans(lengths, own), uses)
    flops = replace(flops, teacher=teacher_flops(objective, mean_spans(lengths, theirs), uses))
    again = 3 * 2 * predicted * 512 * 32
    assert tokens * flops.training + again == pytest.approx(counted.get_total_flops(), rel=0.001)


@pytest.mark.runs
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_the_memory_of_its_states_is_what_they_take(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    """By the allocator's record of its forward pass, with the kernel of GPUs."""
    use_kernel(monkeypatch, lambda q, k, v, layout, window: Attend.apply(q, k, v))
    monkeypatch.setattr("modernbert_train.weights.names.architecture_of", lambda name: SMALL)
    objective, batch = DistillConfig(teacher="x", kl_weight=0.0), make_batch([512] * 4, 8)
    teacher = Teacher(build_model(SMALL, MaskedLmConfig()), bf16=bf16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, autocast(bf16):
        teacher.states(batch.packed)
    weights, whole = (teacher_bytes(objective, bf16=bf16, tokens=each, chunk=0) for each in (0, 2048))
    assert whole - weights == pytest.approx(max(running_total(record)), rel=0.1)


def test_shards_of_it_are_counted_with_what_is_gathered(bert: Path) -> None:
    """On 8 ranks an eighth of the weights, the whole decoder, and during computation the table and two layers."""
    objective, told = DistillConfig(teacher=str(bert)), {"bf16": True, "chunk": 0}
    whole, alone = (teacher_bytes(objective, tokens=0, shards=each, **told) for each in (1, 8))
    decoder = 2 * 30_522 * 768
    assert alone == pytest.approx((whole - decoder) / 8 + decoder, rel=0.01)
    assert teacher_bytes(replace(objective, kl_weight=0.0), tokens=0, shards=8, **told) < alone - 0.99 * decoder
    computing = teacher_bytes(objective, tokens=1, shards=8, **told)
    assert computing - alone > 4 * 30_522 * 768 + 2 * 2 * 7_000_000
    config = load_run([RECIPE], [f"objective.teacher={bert}", "distributed.strategy=fsdp2"])
    assert "forward only, a share on each of 8 GPUs" in printed(make_plan(config, 8)).notes[0]
