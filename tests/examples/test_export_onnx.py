"""examples/export_onnx.py: a served file must give transformers' results, for any texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

TEXTS = ["aki nabe", "kelo ruto tinda mosa lebi aki", "mosa", *["lamu nabe ruto"] * 7]


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["modernbert", "bert", "albert", "xlnet", "deberta"])
def test_hidden_states_equal_transformers(
    models: dict[str, Path], tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a batch that was never seen when the file was made: other texts, other lengths, one text. A file that
    computes something else does not stay: it would be served for months before anybody compares."""
    from transformers import AutoModel, AutoTokenizer

    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'modernbert-train[onnx]'")
    from examples import export_onnx  # it imports onnxruntime, which starts a thread: no process with one is forked

    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    words = [str(models[encoder]), "--texts", f"{tmp_path}/texts.txt", "--out", f"{tmp_path}/out"]
    export_onnx.main([*words, *["--int8"] * (encoder in ("bert", "modernbert"))])
    told = json.loads((tmp_path / "out/onnx.json").read_text())
    assert told["model.onnx"]["largest_difference"] < 1e-5 and told["model.onnx"]["cosine"] > 0.999999
    session = onnxruntime.InferenceSession(str(tmp_path / "out/model.onnx"))
    names = {each.name for each in session.get_inputs()}
    reader, model = AutoTokenizer.from_pretrained(models[encoder]), AutoModel.from_pretrained(models[encoder]).eval()
    for others in (["lebi " * 20], ["tinda", "aki beru domi " * 7, "x"]):
        batch = reader(others, padding=True, return_tensors="pt")
        (mine,) = session.run(None, {key: value.numpy() for key, value in batch.items() if key in names})
        with torch.no_grad():
            theirs = model(**batch).last_hidden_state.numpy()
        mask = batch["attention_mask"].numpy().astype(bool)
        np.testing.assert_allclose(mine[mask], theirs[mask], atol=1e-5)
    if "model_int8.onnx" in told:  # 8 bits of each weight: near, smaller, and said how near
        assert 0.98 < told["model_int8.onnx"]["cosine"] < 1 - 1e-7
        assert told["model_int8.onnx"]["megabytes"] < told["model.onnx"]["megabytes"]  # of so small a one half is graph
    monkeypatch.setattr(export_onnx, "LARGEST_DIFFERENCE", 0.0)
    monkeypatch.setattr(export_onnx, "export", lambda *_: None)  # the file is there
    with pytest.raises(SystemExit, match="its outputs differ from transformers'"):
        export_onnx.main(words)
    assert not (tmp_path / "out/model.onnx").exists()
