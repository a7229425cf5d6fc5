"""examples/train_setfit.py: the drawn texts, the stored files, and the same result by its seed.

If this breaks, loading a stored model runs code from its file, or two rows of a table learned from other texts than
they say.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.train_setfit import Example, draw, load, main
from tests.support.example_data import PICKLES, files_in, offline, table
from tests.support.needs import needs

needs("setfit", "pip install 'modernbert-train[setfit]'")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("csv")
    (home / "train.csv").write_text(table(120, 1), encoding="utf-8")
    (home / "test.csv").write_text(table(60, 2) + "?!,up\nwho knows,other\n", encoding="utf-8")
    return ["--train", f"{home}/train.csv", "--test", f"{home}/test.csv"]


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("setfit") / "out"
    small = ["--max-tokens", "32", "--shots", "6", "--num-iterations", "8", "--lr", "2e-3"]
    with offline():
        main([str(models["modernbert"]), *files, "--out", str(out), *small])
    return out


@pytest.mark.runs
def test_it_learns_beside_what_the_frozen_encoder_gives(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text(encoding="utf-8"))
    assert 60 / 61 >= result["accuracy"] > result["frozen_accuracy"] > 1 / 3  # one is of a class it has not


@pytest.mark.runs
def test_what_was_stored_runs_no_code(trained: Path) -> None:
    found = files_in(trained)
    assert {path.name for path in found} >= {"head.safetensors", "config_setfit.json", "modules.json"}
    assert not [path for path in found if path.suffix in PICKLES]
    assert not [path for path in found if path.read_bytes()[:2] in (b"PK", b"\x80\x04", b"\x80\x05")]
    head = load_file(trained / "head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {
        "coef": (3, 32), "intercept": (3,), "classes": (3,)
    }  # fmt: skip


@pytest.mark.runs
def test_the_regression_that_is_opened_is_the_one_that_was_stored(trained: Path) -> None:
    """Tensors in, the same probabilities out as a formula gives."""
    with offline():
        model = load(trained)
    texts, head = ["nabe aki", "kelo ruto", "mosa"], load_file(trained / "head.safetensors")
    logits_NC = model.encode(texts) @ head["coef"].numpy().T + head["intercept"].numpy()
    expected = torch.softmax(torch.from_numpy(logits_NC), dim=1).numpy()
    np.testing.assert_allclose(model.predict_proba(texts, as_numpy=True), expected, atol=1e-6)
    assert {*model.predict(texts)} <= {"up", "down", "flat"}


@pytest.mark.slow
def test_the_same_seed_is_the_same_model(models: dict[str, Path], files: list[str], tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        words = ["--out", f"{tmp_path}/{name}", "--seed", seed, "--steps", "3", "--shots", "4"]
        main([str(models["bert"]), *files, *words])
    for file in ("model.safetensors", "head.safetensors"):
        a, b, c = (load_file(tmp_path / f"{name}/{file}") for name in "abc")
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert any(not torch.equal(a[name], c[name]) for name in a)


def test_texts_are_drawn_by_class_and_seed() -> None:
    every = [Example(f"text {number}", "abc"[number % 3]) for number in range(300)]
    drawn = draw(every, 8, seed=1)
    assert Counter(each.label for each in drawn) == {"a": 8, "b": 8, "c": 8} and len({*drawn}) == 24
    assert draw(every, 8, seed=1) == drawn != draw(every, 8, seed=2)
    assert [each for each in draw(every, 16, seed=1) if each.label == "b"][:8] == drawn[8:16]  # fewer are some of more


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("text,tone\na,up\n", [], "lacks a column 'label'"),
        ("text,label\na,up\nb,\n", [], "a row lacks a label"),
        ("text,label\na,up\nb,up\n", [], "2 texts of 1 classes"),
        ("text,label\n" + "a,up\nb,down\n" * 1600, ["--shots", "1600"], "3,000 texts are the most"),
    ],
)
def test_files_that_teach_nothing_or_too_much_are_refused(
    text: str, words: list[str], message: str, tmp_path: Path
) -> None:
    """The library lists all pairs before it takes some: 10,000 texts would be 50 million of them."""
    (tmp_path / "train.csv").write_text(text, encoding="utf-8")
    files = ["--train", f"{tmp_path}/train.csv", "--test", f"{tmp_path}/train.csv", "--out", f"{tmp_path}/out"]
    with pytest.raises(SystemExit, match=message):
        main([str(tmp_path), *files, *words])
    assert not (tmp_path / "out").exists()
