"""Baselines by the same code: a frozen encoder, and an untrained one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import (
    AnswerConfig,
    ChooseConfig,
    ClassifyConfig,
    LabelledConfig,
    ModelConfig,
    TagConfig,
)
from modernbert_train.core.tensor_files import read_tensors
from modernbert_train.data.packing import Chunk
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.optim.groups import weights_of
from modernbert_train.report.throughput import training_flops
from modernbert_train.weights.hf_folder import load_weights
from tests.support.finetuning import Tuning, write_tags
from tests.support.labelled import BERT, CONFIGS, MODERNBERT
from tests.support.runs import weights


@pytest.mark.parametrize("config", [BERT, MODERNBERT], ids=["bert", "modernbert"])
@pytest.mark.parametrize(
    "objective",
    [ClassifyConfig(labels=("a", "b")), TagConfig(labels=("a", "b")), AnswerConfig(), ChooseConfig(labels=("0", "1"))],
    ids=lambda each: each.name,
)
def test_of_a_frozen_encoder_one_matrix_learns(config: ModelConfig, objective: LabelledConfig) -> None:
    """No dense matrix, or the head would not be linear; no dropout, or training would see other states."""
    model = build_model(replace(config, dropout=0.5) if config is BERT else config, replace(objective, freeze=True))
    assert [weight.name for weight in weights_of(model)] == ["classifier.weight", "classifier.bias"]
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"model", "classifier"}
    model.train()
    assert model.training and not model.model.training
    model.eval()
    assert not model.training


def test_of_a_frozen_encoder_only_the_forward_pass_counts_for_mfu() -> None:
    """Otherwise it would seem three times as fast as it is."""
    rows = [(Chunk(0, 0, 0, 40), Chunk(0, 1, 0, 20))]
    tuned, frozen = (
        training_flops(rows, {"classify": 2}, BERT, ClassifyConfig(labels=("a", "b"), freeze=freeze))
        for freeze in (False, True)
    )
    assert frozen == pytest.approx(tuned / 3, rel=0.05)  # without the dense matrix of two poolers


@pytest.mark.runs
def test_a_frozen_encoder_keeps_its_bits_and_its_head_learns(tuning: Tuning) -> None:
    task = tuning.write(frozen={"lr": 3e-2, "epochs": 6})
    model = Path(f"frozen:{tuning.models['bert']}")
    result = tuning.run(task, model, "lr=1e-5", "lora.rank=2")
    assert "warning: lr= applies to full fine-tuning; a frozen encoder uses frozen.lr=0.03" in tuning.said
    assert "warning: lora.rank=2: applies to adapters, and a frozen encoder has none." in tuning.said
    assert "the outcome will not be exported" in tuning.said
    before, after = load_weights(tuning.models["bert"]), weights(tuning.tone)
    encoder = [key for key in after if key.startswith("model.")]
    assert encoder and all(torch.equal(after[key], before[key]) for key in encoder)
    assert {*after} - {*encoder} == {"classifier.weight", "classifier.bias"}
    assert (result["source"], result["settings"]["freeze"], result["settings"]["pooling"]) == (str(model), True, "mean")
    assert result["figures"]["dev"]["accuracy"] > result["figures"]["dev"]["baseline/accuracy"]


@pytest.mark.runs
@pytest.mark.parametrize(
    ("prefix", "lr", "warned"), [("", "5e-5", True), ("", "1e-3", False), ("frozen:", "5e-5", False)]
)
def test_a_rate_of_large_encoders_is_questioned_for_a_small_one(
    prefix: str, lr: str, warned: bool, tuning: Tuning
) -> None:
    """The default is for 100 M parameters, and 1.6 M learned less at 3e-4 than at 1e-3."""
    tuning.run(tuning.write(steps=2), Path(f"{prefix}{tuning.models['bert']}"), f"lr={lr}")
    assert ("which may need about 1e-3; see docs/finetuning.md" in tuning.said) is warned


@pytest.mark.runs
def test_an_untrained_twin_has_fresh_weights_by_the_seed(tuning: Tuning) -> None:
    """It has the same architecture, tokenizer and texts, but fresh weights, visible when it is frozen."""
    task = write_tags(tuning.folder, tuning.write)
    result = tuning.run(task, Path(f"frozen:untrained:{tuning.models['bert']}"), "seed=5", "frozen.epochs=1")
    folder = tuning.tone
    config = load_run([folder / "config.yaml"])
    assert config.weights.init_from is None
    assert result["weights"] == "scratch"
    fresh = build_model(config.model, config.objective)
    initialize(fresh, config.model, 5)
    expected, after = dict(fresh.named_parameters()), weights(folder)
    assert all(torch.equal(after[key], expected[key]) for key in after if key.startswith("model."))
    there = load_weights(tuning.models["bert"])
    assert not torch.equal(after["model.layers.0.attn.Wqkv.weight"], there["model.layers.0.attn.Wqkv.weight"])
    assert replace(config.model, init_std=0) == replace(CONFIGS["bert"], init_std=0)
    assert json.loads((folder / "hf" / "config.json").read_text())["architectures"] == ["BertForTokenClassification"]
    assert read_tensors(folder / "hf" / "model.safetensors")
