"""SetFit over our encoders: which texts are drawn, what is stored, that it is the same by its seed and after it.

If this breaks, a stored model runs whatever somebody put into its file, or two rows of a table learned from other texts
than they say.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modernbert_train.__main__ import main
from modernbert_train.config.tools.setfit import SetfitConfig, setfit_problems
from modernbert_train.downstream import runs, setfit
from modernbert_train.downstream.setfit import Example, draw, read_corpus
from modernbert_train.errors import ConfigError, DataError
from tests.downstream.conftest import PICKLES, files_in, offline, table, write_recipe

ROOT = Path(__file__).parents[2]
SMALL = {"max_tokens": 32, "device": "cpu", "shots": 6, "num_iterations": 8}


def write_files(folder: Path) -> dict[str, object]:
    (folder / "train.csv").write_text(table(120, 1), encoding="utf-8")
    (folder / "dev.csv").write_text(table(60, 2), encoding="utf-8")
    files = {"train": f"{folder}/train.csv", "validation": {"dev": f"{folder}/dev.csv"}}
    return files | {"runs_folder": f"{folder}/runs"}


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    home = tmp_path_factory.mktemp("setfit")
    recipe = write_recipe(home / "tone.yaml", **write_files(home), **SMALL, lr=2e-3)
    with offline():
        assert main(["setfit", "train", str(recipe), "--model", str(models["modernbert"])]) == 0
    return home / "runs/tone-modernbert-1618"


def config_of(folder: Path, **keys: Any) -> SetfitConfig:
    files = {"train": f"{folder}/train.csv", "validation": {"dev": f"{folder}/dev.csv"}}
    return SetfitConfig(**files | SMALL | keys)


# --- trained ---------------------------------------------------------------------------------------------------------


@pytest.mark.runs
def test_it_learns_beside_what_the_frozen_encoder_gives(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text(encoding="utf-8"))
    figures = result["figures"]["dev"]
    assert {*figures} == {*setfit.METRICS}
    assert figures["accuracy"] > figures["baseline/accuracy"] > 1 / 3
    assert result["labels"] == ["down", "flat", "up"]
    assert result["counts"]["train"]["texts"] == 18 and result["counts"]["train"]["left"] == 102
    assert result["training"]["pairs"] == 2 * 8 * 18
    assert (result["task"], result["seed"], result["run"]) == ("tone", 1618, "tone-modernbert-1618")


@pytest.mark.runs
def test_what_was_stored_says_what_was_measured(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = json.loads((trained / "result.json").read_text(encoding="utf-8"))["figures"]["dev"]
    with offline():
        again = setfit.evaluate(str(trained))["dev"]
        assert main(["setfit", "predict", str(trained), "nabe aki ruto", "kelo"]) == 0
    assert again == {name: measured[name] for name in again} and len(again) == 2
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [each["text"] for each in said] == ["nabe aki ruto", "kelo"]
    assert all(each["label"] in ("down", "flat", "up") and 1 / 3 < each["score"] <= 1 for each in said)


@pytest.mark.runs
def test_what_was_stored_runs_no_code(trained: Path) -> None:
    found = files_in(trained / "model")
    assert {path.name for path in found} >= {"head.safetensors", "config_setfit.json", "modules.json"}
    assert not [path for path in found if path.suffix in PICKLES]
    assert not [path for path in found if path.read_bytes()[:2] in (b"PK", b"\x80\x04", b"\x80\x05")]
    head = load_file(trained / "model/head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {
        "coef": (3, 32), "intercept": (3,), "classes": (3,)
    }  # fmt: skip
    assert not [path for path in found if b"/tmp" in path.read_bytes()]


@pytest.mark.runs
def test_the_regression_is_that_of_the_library(trained: Path) -> None:
    """Tensors in, the same probabilities out as a formula gives."""
    model, texts = setfit.load(trained), ["nabe aki", "kelo ruto", "mosa"]
    head = load_file(trained / "model/head.safetensors")
    logits_NC = model.encode(texts) @ head["coef"].numpy().T + head["intercept"].numpy()
    expected = torch.softmax(torch.from_numpy(logits_NC), dim=1).numpy()
    np.testing.assert_allclose(model.predict_proba(texts, as_numpy=True), expected, atol=1e-6)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("head.safetensors", lambda head: head | {"classes": torch.arange(2)}, "has 3 rows for 2 classes"),
        ("head.safetensors", lambda head: head | {"classes": torch.arange(5, 8)}, "classes that config_setfit.json"),
        ("head.safetensors", lambda head: {"coef": head["coef"]}, "cannot be loaded ('intercept')"),
    ],
)
def test_a_damaged_regression_is_told(trained: Path, file: str, change: Any, message: str) -> None:
    path = trained / "model" / file
    before = path.read_bytes()
    try:
        save_file(change(load_file(path)), path)
        with pytest.raises(DataError) as error:
            setfit.load(trained)
    finally:
        path.write_bytes(before)
    assert message in str(error.value)


@pytest.mark.runs
def test_two_classes_and_the_same_seed_are_the_same_model(models: dict[str, Path], tmp_path: Path) -> None:
    files = write_files(tmp_path)
    for name in ("train", "dev"):
        lines = (tmp_path / f"{name}.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / f"{name}.csv").write_text("".join(line for line in lines if "flat" not in line), encoding="utf-8")
    recipe = write_recipe(tmp_path / "tone.yaml", **files, **SMALL, max_steps=3)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        setfit.train(str(recipe), str(models["bert"]), [f"name={name}", f"seed={seed}"])
    for file in ("model.safetensors", "head.safetensors"):
        a, b, c = (load_file(tmp_path / f"runs/{name}/model/{file}") for name in "abc")
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert any(not torch.equal(a[name], c[name]) for name in a)
    said = setfit.predict(f"{tmp_path}/runs/a", ["aki", "kelo"])
    assert all(each["label"] in ("down", "up") and each["score"] >= 0.5 for each in said)
    with pytest.raises(ConfigError, match="holds a finished run"):
        setfit.train(str(recipe), str(models["bert"]), ["name=a"])


@pytest.mark.runs
def test_the_library_pairs_by_a_seed_of_its_own() -> None:
    """What the documentation says of `seed`. If this fails, the library has changed, and so must docs/downstream.md."""
    from setfit.sampler import ContrastiveDataset

    texts, numbers = [f"text {number}" for number in range(12)], [number % 3 for number in range(12)]
    first = list(ContrastiveDataset(texts, numbers, False, num_iterations=2))
    np.random.seed(7)
    torch.manual_seed(7)
    assert list(ContrastiveDataset(texts, numbers, False, num_iterations=2)) == first


# --- what it reads ---------------------------------------------------------------------------------------------------


def test_texts_are_drawn_by_class_and_seed() -> None:
    every = [Example(f"text {number}", "abc"[number % 3]) for number in range(300)]
    drawn = draw(every, 8, seed=1)
    assert Counter(each.label for each in drawn) == {"a": 8, "b": 8, "c": 8} and len({*drawn}) == 24
    assert draw(every, 8, seed=1) == drawn != draw(every, 8, seed=2)
    assert [each for each in draw(every, 16, seed=1) if each.label == "b"][:8] == drawn[8:16]  # fewer are some of more


def test_odd_texts_are_counted(tmp_path: Path) -> None:
    write_files(tmp_path)
    with (tmp_path / "train.csv").open("a", encoding="utf-8") as file:
        file.write("rare words,rare\n...,up\n")
    with (tmp_path / "dev.csv").open("a", encoding="utf-8") as file:
        file.write("who knows,other\n?!,up\n")
    corpus = read_corpus(config_of(tmp_path))
    train, dev = corpus.counts["train"], corpus.counts["dev"]
    assert (train.texts, train.empty, train.few, train.left) == (19, 1, 1, 102)
    assert (dev.texts, dev.empty, dev.unseen) == (61, 1, 1) and corpus.unseen == {"dev": ("other",)}


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("text,tone\na,up\n", {}, "has no label; it has text, tone. Set text_column and label_column"),
        ("text,label\na,up\nb,up\n", {}, "of one class \\(up\\)"),
        ("text,label\na,up\nb,\n", {}, "line 3: label is '', and not a class"),
        ("text,label\n...,up\n", {}, "holds no text with a letter"),
        ("text,label\na,up\nb\n", {}, "line 3 has 1 value"),
    ],
)
def test_files_that_teach_nothing_are_refused(text: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "train.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_corpus(config_of(tmp_path, **keys))


def test_more_texts_than_can_be_paired_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lists all pairs before it takes some: 10,000 texts would be 50 million of them."""
    write_files(tmp_path)
    monkeypatch.setattr(setfit, "MOST_TEXTS", 20)
    with pytest.raises(ConfigError, match="shots=12: 36 texts of 3 classes"):
        read_corpus(config_of(tmp_path, shots=12))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation": {}}, "validation: nothing to measure on"),
        ({"train": "a.txt"}, "train=a.txt: of which kind"),
        ({"label_column": "text"}, "label_column=text is text_column too"),
        ({"shots": 0}, "shots=0: must be at least 1"),
        ({"lr": 0.0}, "lr=0.0: must be above 0"),
        ({"max_steps": 0}, "max_steps=0: must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], message: str) -> None:
    given = {"train": "a.csv", "validation": {"dev": "b.csv"}}
    assert any(message in each for each in setfit_problems(SetfitConfig(**given | keys)))
    assert not list(setfit_problems(SetfitConfig(**given)))


def test_the_recipe_is_taken() -> None:
    config = runs.read_settings(SetfitConfig, setfit_problems, ROOT / "yamls/setfit/banking77.yaml", ["shots=3"])
    assert (config.label_column, config.shots) == ("category", 3)


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "tone.yaml", **write_files(tmp_path))
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'modernbert-train\[setfit\]'"):
        setfit.train(str(recipe), "anything", [])


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setfit", "evaluate", str(tmp_path)]) == 65
    assert "no run of `setfit train`" in capsys.readouterr().err
