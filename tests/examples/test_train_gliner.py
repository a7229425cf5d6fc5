"""examples/train_gliner.py: it learns, reads words as in running text, and is the same by its seed.

If this breaks, an encoder is blamed for words that it never saw in that form, or for types that were never queried.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from examples.train_gliner import Sentence, Visits, add_leading_space, main, read_conll
from tests.support.example_data import PICKLES, conll, files_in, offline
from tests.support.needs import needs

needs("gliner", "pip install 'modernbert-train[gliner]'")
SMALL = ["--hidden-size", "16", "--max-width", "3", "--max-len", "32", "--device", "cpu", "--batch-size", "8"]
FAST = ["--lr", "3e-3", "--others-lr", "3e-3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("conll")
    (home / "train.conll").write_text(conll(96, 1), encoding="utf-8")
    (home / "dev.conll").write_text(conll(40, 2) + "\naki\tI-a-river\n", encoding="utf-8")
    return ["--train", f"{home}/train.conll", "--dev", f"{home}/dev.conll"]


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gliner") / "out"
    with offline():
        main([str(models["modernbert"]), *files, "--out", str(out), *SMALL, *FAST, "--steps", "60", "--dropout", "0"])
    return out


@pytest.mark.runs
def test_it_learns_and_measures_types_that_training_had_not_apart(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text(encoding="utf-8"))
    assert result["f1"] > 0.5 and 0 <= result["zero_shot_f1"] <= 1
    assert result["steps"] == 60


@pytest.mark.runs
def test_the_library_opens_what_was_stored(trained: Path) -> None:
    from gliner import GLiNER

    with offline():
        model = GLiNER.from_pretrained(str(trained), local_files_only=True)
    found = model.predict_entities("nabe aki ruto", ["a person", "place"])
    assert [(each["text"], each["label"]) for each in found] == [("aki", "a person")]
    tokens = model.data_processor.transformer_tokenizer.tokenize(["domi"], is_split_into_words=True)
    assert tokens[0].startswith("Ġ"), "as the encoder was trained on it"


@pytest.mark.runs
def test_what_was_stored_runs_no_code_and_names_no_place_of_this_machine(trained: Path) -> None:
    found = files_in(trained)
    assert {path.name for path in found} >= {"model.safetensors", "gliner_config.json", "tokenizer.json"}
    assert not [path for path in found if path.suffix in PICKLES]
    assert not [path for path in found if path.name != "result.json" and b"/tmp" in path.read_bytes()]


@pytest.mark.slow
def test_the_same_seed_is_the_same_model_and_the_encoder_is_left_alone(
    models: dict[str, Path], files: list[str], tmp_path: Path
) -> None:
    before = (models["bert"] / "tokenizer.json").read_bytes()
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        words = ["--out", f"{tmp_path}/{name}", "--seed", seed, "--steps", "3", *SMALL]
        main([str(models["bert"]), *files, *words])
    a, b, c = (load_file(tmp_path / f"{name}/model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)
    assert (models["bert"] / "tokenizer.json").read_bytes() == before


def test_a_file_is_read_as_entities_of_words(tmp_path: Path) -> None:
    text = "Ada\tB-a-person\nKing\tI-a-person\nmet\tO\nBob\tI-a-person\n \n...\tO\n\nRome\tx\tB-place\n"
    (tmp_path / "names.conll").write_text(text, encoding="utf-8")
    first, second = read_conll(tmp_path / "names.conll")
    assert first["ner"] == [[0, 1, "a person"], [3, 3, "a person"]]
    assert second == {"tokenized_text": ["Rome"], "ner": [[0, 0, "place"]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [("aki\tB-x\nnabe\n", "'nabe' is not a word with a tag"), ("aki\tperson\n", "'aki person' is not")],
)
def test_a_broken_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "names.conll").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        list(read_conll(tmp_path / "names.conll"))


def pieces(folder: Path, words: list[str]) -> list[list[str]]:
    """Of each word alone, as a list of words is read."""
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(
        words, is_pretokenized=True, add_special_tokens=False
    )
    return [[t for t, w in zip(encoding.tokens, encoding.word_ids, strict=True) if w == n] for n in range(len(words))]


def test_words_of_a_list_have_the_space_before_them(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "copy")
    words = ["beru", "tinda", "kelo"]
    running = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("x beru tinda kelo").tokens
    assert not any(first[0].startswith("Ġ") for first in pieces(tmp_path / "copy", words))  # the trap
    add_leading_space(tmp_path / "copy")
    found = [piece for each in pieces(tmp_path / "copy", words) for piece in each]
    assert found == running[-len(found) - 1 : -1] and found[0].startswith("Ġ")  # before [SEP]


def test_no_space_is_put_into_a_word_that_another_step_cuts_first(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "copy")
    file = tmp_path / "copy/tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, raw["pre_tokenizer"]]}
    file.write_text(json.dumps(raw), encoding="utf-8")
    add_leading_space(tmp_path / "copy")
    ((first, *rest),) = pieces(tmp_path / "copy", ["b12a"])
    assert first.startswith("Ġ") and "Ġ" not in "".join(rest)


def test_sentences_get_types_that_they_lack() -> None:
    """Each sentence once in each pass, in another order; one without entities is queried for some type too."""
    sentences: list[Sentence] = [
        {"tokenized_text": [f"w{number}"], "ner": [[0, 0, "abcd"[number % 4]]] if number % 3 else []}
        for number in range(12)
    ]
    options = argparse.Namespace(seed=1, steps=60, batch_size=4, ask_absent=0.5, max_types=25)
    visits, again = Visits(sentences, options), Visits(sentences, options)
    seen = [visits[number] for number in range(len(visits))]
    assert len(seen) == 240 and [again[number] for number in reversed(range(240))] == seen[::-1]
    passes = [[each["tokenized_text"][0] for each in seen[at : at + 12]] for at in range(0, 240, 12)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes) and passes[0] != passes[1]
    assert all({kind for *_, kind in each["ner"]} <= {*each["ner_labels"]} for each in seen)
    asked = Counter(label for each in seen if not each["ner"] for label in each["ner_labels"])
    assert all(20 < asked[label] < 65 for label in "abcd")  # of 80
    options.max_types = 2
    assert max(len(Visits(sentences, options)[number]["ner_labels"]) for number in range(240)) == 2
