"""Discriminators and generators in transformers' files: continued here, or refused if they are another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from modernbert_train.config.schema import ComputeConfig, ModelConfig
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.models.build import ENCODERS
from modernbert_train.models.replaced import Discriminator
from modernbert_train.vocabulary import read_vocabulary
from modernbert_train.weights.formats import electra, read_folder
from modernbert_train.weights.hf_folder import export, load_weights
from tests.support.encoders import BERT, DEBERTA, MODERNBERT, fill
from tests.support.front_door import Cli

MODELS: dict[str, ModelConfig] = {"modernbert": MODERNBERT, "bert": BERT, "deberta": DEBERTA}
NAMED = {"modernbert": "ModernBertForTokenClassification", "bert": "ElectraForPreTraining"}


def weights_of(config: ModelConfig) -> dict[str, torch.Tensor]:
    model = Discriminator(ENCODERS[type(config)](config, ComputeConfig()))
    fill(model, config)
    return model.state_dict()


@pytest.fixture
def written(request: pytest.FixtureRequest, tokenizer_folder: Path, tmp_path: Path) -> tuple[str, Path]:
    folder, config = tmp_path / "hf", MODELS[request.param]
    export(weights_of(config), config, max_tokens=40, tokenizer_folder=tokenizer_folder, out=folder, card="")
    return request.param, folder


@pytest.mark.runs
@pytest.mark.parametrize("written", NAMED, indirect=True)
def test_it_comes_back_bit_by_bit(written: tuple[str, Path], tmp_path: Path) -> None:
    """From our file and from transformers', including its kind."""
    name, folder = written
    original = weights_of(MODELS[name])
    getattr(transformers, NAMED[name]).from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    for each in (folder, tmp_path / "theirs"):
        assert read_folder(each).model == MODELS[name]
        back = load_weights(each)
        assert back.keys() == original.keys() and all(torch.equal(back[key], original[key]) for key in original)


@pytest.mark.parametrize("written", MODELS, indirect=True)
def test_import_config_continues_to_detect(written: tuple[str, Path], cli: Cli) -> None:
    """Its generator is unknown, and the output says so."""
    name, folder = written
    for file in ("config.json", "."):
        said = cli("init", "from", folder / file)
        ours = yaml.safe_load(said.out)
        assert ours["model"]["name"] == name and ours["objective"] == {"name": "rtd"}
        assert ours["weights"] == {"init_from": str(folder)}
        assert "config.json does not describe the generator" in said.out + said.err


def test_a_generator_comes_back(tmp_path: Path) -> None:
    """transformers' ElectraForMaskedLM is a BERT that predicts tokens."""
    theirs = transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(
            vocab_size=160, embedding_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=96, max_position_embeddings=400, hidden_dropout_prob=0.0, initializer_range=0.1,
        )
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    assert read_folder(tmp_path).model == MODELS["bert"]
    back = load_weights(tmp_path)
    assert torch.equal(back["decoder.weight"], theirs.electra.embeddings.word_embeddings.weight)
    assert torch.equal(back["head.dense.weight"], theirs.generator_predictions.dense.weight)
    assert {name.partition(".")[0] for name in back} == {"model", "head", "decoder"}


def changed(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    stored = load_file(folder / "model.safetensors")
    tensor = change(stored.pop(name))
    save_file(stored | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("written", ["modernbert"], indirect=True)
def test_a_class_that_is_not_zero_is_another_model(written: tuple[str, Path]) -> None:
    """A model fine-tuned for two labels would be read without half of its classifier."""

    def fine_tuned(weight: torch.Tensor) -> torch.Tensor:
        assert weight.shape == (2, 64) and not weight[0].any()
        return weight + 0.1

    changed(written[1], "classifier.weight", fine_tuned)
    with pytest.raises(DataError, match=r"classifier\.weight is not zero in the first row"):
        load_weights(written[1])


@pytest.mark.parametrize("written", ["bert"], indirect=True)
@pytest.mark.parametrize("missing", ["discriminator_predictions.dense.bias", "electra.embeddings.LayerNorm.weight"])
def test_a_part_of_a_head_is_no_head(missing: str, written: tuple[str, Path]) -> None:
    changed(written[1], missing, lambda _: None)
    with pytest.raises(DataError, match="missing"):
        load_weights(written[1])


def test_a_generator_of_another_gelu_is_not_exported(tokenizer_folder: Path) -> None:
    """transformers' would compute something else; its discriminator is unaffected."""
    config = replace(BERT, activation="gelu_tanh")
    vocabulary = read_vocabulary(tokenizer_folder)
    with pytest.raises(ConfigError, match="Export only the discriminator"):
        electra.generator_format(config, None)
    assert electra.FORMAT.describe(config, "all", ("model", "token_head"), 40, vocabulary)["hidden_act"] == "gelu_new"
