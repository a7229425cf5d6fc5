"""What a plan says of a teacher. If this breaks, a run is planned at 40 % less than it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import BertConfig, ComputeConfig, DistillConfig, MaskedLmConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.distilled import Teacher
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import Spans, flops_per_token
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.sections import sections
from modernbert_train.plan.teacher import teacher_bytes, teacher_flops

RECIPE = Path(__file__).parents[2] / "yamls/recipes/distilbert.yaml"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """bert-base-uncased as far as a plan reads it."""
    about = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    return tmp_path


def test_a_teacher_goes_forward_once(bert: Path) -> None:
    """Its predictions too, where they are compared: those of every masked token."""
    config = load_run([RECIPE], [f"objective.teacher={bert}"])
    (phase,) = make_plan(config, 1).phases
    share = 0.15 * (1 - 2 / 512)
    alone = flops_per_token(census(BertConfig()), Spans(512, 0), {"tokens": share}).forward
    assert phase.flops.teacher == pytest.approx(alone)
    assert phase.flops.training == pytest.approx(3 * phase.flops.forward + alone)
    assert 1.9 < alone / phase.flops.forward < 2.0, "twice the layers, and the same head"
    states = replace(config.objective, kl_weight=0.0)
    assert teacher_flops(states, Spans(512, 0), {"tokens": share, "cosine": 1.0}) < alone
    said = [section for section in sections(make_plan(config, 1), "h100", ["h100"], {}) if section.title == "Teacher"]
    assert said[0].rows[1][:3] == ("main", "0.1959", "39.1 %")


def test_one_that_is_not_here_is_not_counted_and_that_is_said() -> None:
    plan = make_plan(load_run([RECIPE]), 1)
    assert plan.phases[0].flops.teacher == 0
    (said,) = (section for section in sections(plan, "h100", ["h100"], {}) if section.title == "Teacher")
    assert said.notes == [
        "google-bert/bert-base-uncased is in no folder here: neither its FLOPs nor its memory are counted."
    ]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_memory_of_its_weights_is_what_they_take(bert: Path, bf16: bool) -> None:
    """As models/distilled.py keeps them."""
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
