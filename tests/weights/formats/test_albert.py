"""Weights that ALBERT's layers share, in files that store every layer separately."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from modernbert_train.__main__ import main
from modernbert_train.config.load import load_run
from modernbert_train.errors import DataError
from modernbert_train.weights.formats import albert
from modernbert_train.weights.formats.tensors import from_hf, to_hf
from tests.support.encoders import ALBERT
from tests.weights.formats.models import SAID, UNSAID, weights_of, write

LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.{}."


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
