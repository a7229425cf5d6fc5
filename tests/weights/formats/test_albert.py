"""Weights that ALBERT's layers share, in files that store every layer separately."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from modernbert_train.__main__ import main
from modernbert_train.config.load import load_run
from modernbert_train.errors import DataError
from modernbert_train.weights.formats import albert
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from modernbert_train.weights.hf_folder import load_weights
from tests.weights.formats.models import ALBERT, SAID, UNSAID, assert_equal, describe, weights_of, write

LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}."


def test_what_is_shared_is_stored_once_a_group() -> None:
    """Three of four layers' copies of the feed-forward equal the first; there are four attentions, not one."""
    stored = to_hf(albert.FORMAT, weights_of(UNSAID["albert, ffn"]), UNSAID["albert, ffn"])
    groups = [LAYER.format(group, 0) for group in range(4)]
    for name in ("ffn.weight", "ffn.bias", "ffn_output.weight", "full_layer_layer_norm.bias"):
        assert all(torch.equal(stored[group + name], stored[groups[0] + name]) for group in groups), name
    for name in ("attention.query.weight", "attention.LayerNorm.weight"):
        assert not any(torch.equal(stored[group + name], stored[groups[0] + name]) for group in groups[1:]), name
    said = describe(UNSAID["albert, ffn"])
    assert (said["num_hidden_layers"], said["num_hidden_groups"], said["inner_group_num"]) == (4, 4, 1)
    whole = describe(SAID["albert, groups and turns"])
    assert (whole["num_hidden_layers"], whole["num_hidden_groups"], whole["inner_group_num"]) == (2, 2, 2)


def test_copies_that_differ_are_not_one_tensor() -> None:
    """If one number differs, the run would start from another model than it names."""
    config = UNSAID["albert, ffn"]
    stored = to_hf(albert.FORMAT, weights_of(config), config)
    name = LAYER.format(2, 0) + "ffn_output.weight"
    stored[name] = stored[name].clone()
    stored[name][3, 5] += 1e-6
    with pytest.raises(DataError, match=rf"^file: {name} differs from .*groups\.0\..*layers of this model share them"):
        from_hf(albert.FORMAT, stored, config, "file")
    assert len(from_hf(albert.FORMAT, stored, SAID["albert, none"], "file")) > 60
    with pytest.raises(DataError, match=r"\d+ tensors are unknown"):  # another number of groups
        from_hf(albert.FORMAT, stored, ALBERT, "file")


@pytest.mark.runs
def test_import_config_reads_an_albert_and_sees_what_it_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights decide; without them only config.json is known."""
    read = {way: config for way, config in SAID.items() if way.startswith("albert")}
    for way, config in {**read, "attention": UNSAID["albert, attention"], "ffn": UNSAID["albert, ffn"]}.items():
        folder = write(tmp_path / way, config, weights_of(config))
        assert main(["init", "from", str(folder / "config.json"), "--out", str(tmp_path / f"{way}.yaml")]) == 0
        ours = yaml.safe_load((tmp_path / f"{way}.yaml").read_text())
        assert ours["weights"] == {"init_from": str(folder)} and ours["objective"] == {"name": "mlm"}
        assert load_run([tmp_path / f"{way}.yaml"], ["name=x", "data.tokenizer=x", "optim.lr=1"]).model == config
        (folder / "model.safetensors").unlink()
        capsys.readouterr()
        assert main(["init", "from", str(folder / "config.json")]) == 0
        out = capsys.readouterr()
        model = yaml.safe_load(out.out)["model"]
        assert model["sharing"] == (config.sharing if way in SAID else "none")
        assert "weights.init_from: the folder lacks model.safetensors" in out.err


@pytest.mark.runs
def test_weights_are_read_as_the_run_shares(tmp_path: Path) -> None:
    """The folder has one group a layer; a run that shares the feed-forward reads it as one."""
    config = UNSAID["albert, ffn"]
    weights = weights_of(config)
    folder = write(tmp_path / "hf", config, weights)
    assert_equal(load_weights(folder, config), weights)
    assert len(load_weights(folder)) > len(weights)
