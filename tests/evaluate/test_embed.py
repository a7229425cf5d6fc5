"""`embed`: a file's vectors equal `load_model(...).embed`, in order; the file is complete or absent."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from modernbert_train import load_model
from modernbert_train.evaluate import embed_file
from tests.support.front_door import Cli
from tests.support.labelled import json_lines
from tests.support.tiny_run import TinyRun

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

TEXTS = [" ".join(f"w{(3 * number + place) % 300}" for place in range(1 + number * 7 % 23)) for number in range(30)]
TEXTS[4] = " ".join(["w7 w8"] * 200)  # more tokens than fit


@pytest.mark.runs
def test_vectors_of_a_file_are_those_of_the_exported_model(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Otherwise an index made with one could not be searched with the other."""
    from transformers import AutoModel, AutoTokenizer

    cli("train", *tiny_run("phases.long=null", "phases.short.tokens=1600", "data.validation=null"))
    trained = tmp_path / "runs/tiny"
    cli("export", trained, "--out", tmp_path / "hf")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "texts.jsonl").write_text(json_lines({"id": 1, "body": text} for text in TEXTS))
    parquet.write_table(pyarrow.table({"text": TEXTS, "id": range(30)}), tmp_path / "texts.parquet")
    said = ""

    def embed(texts: str, out: str, *options: str) -> Path:
        nonlocal said
        said = cli("embed", trained, tmp_path / texts, "--out", tmp_path / out, *options).out
        return tmp_path / out

    encoder = load_model(trained)
    expected = encoder.embed(TEXTS).numpy()
    found = np.load(embed("texts.txt", "lines.npy"))
    assert found.dtype == np.float32 and np.array_equal(found, expected)
    cut = sum(len(ids) > 62 for ids in encoder.token_ids(TEXTS))
    assert f"lines.npy: 30 texts, {cut} of them cut at 64 tokens, 32 x float32 each" in said
    with monkeypatch.context() as patched:
        patched.setattr(embed_file, "_MAX_TEXTS", 7)  # parts of the file
        many = parquet.read_table(embed("texts.jsonl", "objects.parquet", "--column", "body", "--batch-tokens", "50"))
    np.testing.assert_allclose(np.array(many["embedding"].to_pylist(), np.float32), expected, atol=1e-6)
    halves = np.load(embed("texts.parquet", "rows.npy", "--dtype", "float16"))
    assert halves.dtype == np.float16
    np.testing.assert_allclose(halves, expected, atol=2e-3)
    table = parquet.read_table(embed("texts.txt", "halves.parquet", "--dtype", "float16"))
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float16), halves)
    firsts = np.load(embed("texts.txt", "firsts.npy", "--pooling", "cls"))
    assert np.array_equal(firsts, encoder.embed(TEXTS, pooling="cls").numpy())
    for wrong, choices in (  # each was taken for another one
        ({"pooling": "max"}, "pooling='max': is not known here. Choose from cls, mean."),
        ({"precision": "fp8"}, "precision='fp8': is not known here. Choose from auto, fp32, bf16."),
        ({"device": "tpu"}, "device='tpu': is not known here. Choose from auto, cpu, cuda."),
        ({"batch_tokens": 0}, "batch_tokens=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(choices)):
            encoder.embed(TEXTS, **wrong)  # type: ignore[arg-type]

    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "hf"), AutoModel.from_pretrained(tmp_path / "hf").eval()
    for text, mean_D, first_D in zip(TEXTS, expected, firsts, strict=True):
        with torch.no_grad():
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=64)
            hidden_TD = model(**inputs).last_hidden_state[0].numpy()
        np.testing.assert_allclose(mean_D, hidden_TD.mean(0), atol=1e-5)
        np.testing.assert_allclose(first_D, hidden_TD[0], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("texts.txt", b"one\n  \ntwo", "texts.txt: line 2: is empty. Correct it, or remove it"),
        ("texts.txt", b"", "texts.txt: contains no text"),
        ("texts.txt", b"one\n\xff\xfe", "texts.txt: not UTF-8. Correct it, or convert"),
        ("texts.jsonl", b'{"text": "a"}\n\n{"text": }\n', "texts.jsonl: line 3: not JSON"),
        ("texts.jsonl", b'{"text": "a"}\n{"text": 7}\n', "texts.jsonl: line 2: text is 7, and not a text"),
        ("texts.jsonl", b'{"body": "a"}\n', "line 1: no column 'text' among 'body'. Set --column to"),
        ("texts.parquet", b"no", "texts.parquet: cannot be read (ArrowInvalid"),
    ],
)
def test_a_text_that_is_none_is_named_before_a_model_is_loaded(
    tmp_path: Path, cli: Cli, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in cli("embed", "no/model", tmp_path / name, "--out", tmp_path / "vectors.npy", code=65).err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_place_that_cannot_be_written_is_refused_before_texts_are_read(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "there.npy").write_text("mine")
    for out, code, message in (
        ("there.npy", 78, "exists already"),
        ("vectors.csv", 78, "Let it end in .npy or .parquet"),
        ("no/folder/vectors.npy", 74, "cannot be written (No such file or directory)"),
    ):
        said = cli("embed", "no/model", tmp_path / "no.txt", "--out", tmp_path / out, code=code).err
        assert f"--out={tmp_path / out}: " in said and message in said
    said = cli("embed", "no/model", tmp_path / "no.pdf", "--out", tmp_path / "vectors.npy", code=78).err
    assert "Give a file that ends in .txt or .jsonl or .tsv or .csv or .parquet" in said
