"""ONNX files: whoever serves one must get what transformers gives, for any number of texts of any length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.downstream.onnx import write_onnx
from modernbert_train.errors import ConfigError, DataError

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'modernbert-train[onnx]'")
TEXTS = ["aki nabe", "kelo ruto tinda mosa lebi aki", "mosa", *["lamu nabe ruto"] * 7]


@pytest.mark.runs
@pytest.mark.parametrize("encoder", ["modernbert", "bert", "albert", "xlnet"])
def test_hidden_states_are_those_of_transformers(models: dict[str, Path], tmp_path: Path, encoder: str) -> None:
    """Also of a batch that was never seen when the file was made: other texts, other lengths, one text."""
    from transformers import AutoModel, AutoTokenizer

    folder = write_onnx(models[encoder], TEXTS, out=tmp_path, int8=encoder == "modernbert")
    told = json.loads((folder / "onnx.json").read_text())
    assert told["model.onnx"]["largest_difference"] < 1e-5 and told["model.onnx"]["cosine"] > 0.999999
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    names = {each.name for each in session.get_inputs()}
    reader, model = AutoTokenizer.from_pretrained(models[encoder]), AutoModel.from_pretrained(models[encoder]).eval()
    for texts in (["lebi " * 20], ["tinda", "aki beru domi " * 7, "x"]):
        batch = reader(texts, padding=True, return_tensors="pt")
        (mine,) = session.run(None, {key: value.numpy() for key, value in batch.items() if key in names})
        with torch.no_grad():
            theirs = model(**batch).last_hidden_state.numpy()
        mask = batch["attention_mask"].numpy().astype(bool)
        np.testing.assert_allclose(mine[mask], theirs[mask], atol=1e-5)
    if encoder == "modernbert":  # 8 bits of each weight: near, smaller, and said how near
        assert 0.98 < told["model_int8.onnx"]["cosine"] < 1 - 1e-7
        assert told["model_int8.onnx"]["megabytes"] < told["model.onnx"]["megabytes"]  # of so small a one half is graph


def test_what_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.txt"
    assert main(["onnx", str(tmp_path), "--texts", str(texts)]) == 78
    assert "--texts" in capsys.readouterr().err
    texts.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        write_onnx(tmp_path, ["a"])
    (tmp_path / "config.json").write_text("{}")
    assert main(["onnx", str(tmp_path), "--texts", str(texts)]) == 78
    assert "no text in it" in capsys.readouterr().err


@pytest.mark.runs
def test_a_file_that_computes_something_else_does_not_stay(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty translation would be served for months before anybody compares."""
    monkeypatch.setattr("modernbert_train.downstream.onnx.LARGEST_DIFFERENCE", 0.0)
    with pytest.raises(DataError, match="its outputs differ from transformers'"):
        write_onnx(models["bert"], TEXTS[:2], out=tmp_path)
    assert not (tmp_path / "model.onnx").exists()
