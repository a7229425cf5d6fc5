"""GLiNER over our encoders: what it reads, what it counts, that it is the same by its seed and after it was stored.

If this breaks, an encoder is blamed for words that it never saw in that form, or a figure is of other entities than
the file's.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from modernbert_train.__main__ import main
from modernbert_train.config.schema import MaskedLmConfig
from modernbert_train.config.tools.gliner import GlinerConfig, gliner_problems
from modernbert_train.downstream import gliner, runs
from modernbert_train.downstream.entities import Entity, Item, read_corpus, tags_of
from modernbert_train.downstream.gliner import Visits, with_leading_space
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evals.metrics import spans
from modernbert_train.models.build import build_model
from modernbert_train.weights.hf_folder import export
from tests.downstream.conftest import PICKLES, conll, files_in, offline, write_recipe
from tests.finetune.conftest import MODERNBERT

ROOT = Path(__file__).parents[2]
SMALL = {"hidden_size": 16, "max_width": 3, "dropout": 0.0, "max_len": 32, "device": "cpu"}
FAST = {"lr": 3e-3, "others_lr": 3e-3, "batch_size": 8}


def write_files(folder: Path) -> dict[str, object]:
    (folder / "train.conll").write_text(conll(96, 1), encoding="utf-8")
    (folder / "dev.conll").write_text(conll(40, 2), encoding="utf-8")
    files = {"train": f"{folder}/train.conll", "validation": {"dev": f"{folder}/dev.conll"}}
    return files | {"runs_folder": f"{folder}/runs"}


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder."""
    home = tmp_path_factory.mktemp("gliner")
    recipe = write_recipe(home / "names.yaml", **write_files(home), **SMALL, **FAST, max_steps=60)
    with offline():
        assert main(["gliner", "train", str(recipe), "--model", str(models["modernbert"])]) == 0
    return home / "runs/names-modernbert-1618"


def config_of(folder: Path, **keys: Any) -> GlinerConfig:
    files = {"train": f"{folder}/train.conll", "validation": {"dev": f"{folder}/dev.conll"}}
    return GlinerConfig(**files | SMALL | keys)


# --- trained ---------------------------------------------------------------------------------------------------------


@pytest.mark.runs
def test_it_learns_and_says_what_of(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text(encoding="utf-8"))
    assert result["figures"]["dev"]["f1"] > 0.5
    assert (result["task"], result["seed"], result["run"]) == ("names", 1618, "names-modernbert-1618")
    assert result["labels"] == ["a person", "place"] and result["unseen"] == {}
    assert result["counts"]["train"]["texts"] == 96 and result["settings"]["max_steps"] == 60


@pytest.mark.runs
def test_its_figures_are_the_librarys_and_seqevals(trained: Path) -> None:
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2

    model = gliner.load(trained)
    corpus = read_corpus(config_of(trained.parents[1]))
    items = corpus.items["dev"]
    ours = gliner.measure(model, corpus, "dev", 0.4)
    assert 0 < ours["f1"] < 1
    listed = [{"tokenized_text": list(each.words), "ner": [list(entity) for entity in each.entities]} for each in items]
    _, theirs = model.evaluate(listed, flat_ner=True, threshold=0.4, entity_types=list(corpus.labels))
    assert theirs == pytest.approx(ours["f1"], abs=1e-9)
    found = gliner.find(model, items, corpus.labels, 0.4)
    told = [tags_of(entities, len(each.words)) for entities, each in zip(found, items, strict=True)]
    true = [tags_of(each.entities, len(each.words)) for each in items]
    assert f1_score(true, told, mode="strict", scheme=IOB2) == pytest.approx(ours["f1"], abs=1e-9)


@pytest.mark.runs
def test_what_was_stored_says_what_was_measured(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = json.loads((trained / "result.json").read_text(encoding="utf-8"))["figures"]["dev"]
    with offline():
        assert gliner.evaluate(str(trained))["dev"] == measured
        assert main(["gliner", "predict", str(trained), "nabe aki ruto", "...", "--labels", "a person", "a river"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert [(each["text"], each["label"]) for each in first if each["label"] == "a person"] == [("aki", "a person")]
    assert all(each["label"] in ("a person", "a river") for each in [*first, *second])


@pytest.mark.runs
def test_what_was_stored_runs_no_code_and_names_no_place_of_this_machine(trained: Path) -> None:
    found = files_in(trained / "model")
    assert {path.name for path in found} >= {"model.safetensors", "gliner_config.json", "tokenizer.json"}
    assert not [path for path in found if path.suffix in PICKLES]
    here = [path for path in found if b"/tmp" in path.read_bytes() or str(trained.parent).encode() in path.read_bytes()]
    assert here == []
    assert not list(trained.glob(".*"))


@pytest.mark.runs
def test_words_are_read_as_in_running_text_also_after_it_was_stored(trained: Path, models: dict[str, Path]) -> None:
    """Else "domi" is not the " domi" that the encoder was trained on."""
    before = Tokenizer.from_file(str(models["modernbert"] / "tokenizer.json"))
    tokenizer = gliner.load(trained).data_processor.transformer_tokenizer
    assert (
        tokenizer.tokenize(["domi", "nabe"], is_split_into_words=True)
        == before.encode("ruto domi nabe", add_special_tokens=False).tokens[
            -len(tokenizer.tokenize(["domi", "nabe"], is_split_into_words=True)) :
        ]
    )
    assert tokenizer.tokenize(["domi"], is_split_into_words=True)[0].startswith("Ġ")


@pytest.mark.runs
@pytest.mark.parametrize("vocab_size", [512, 576])
def test_the_three_new_tokens_are_rows_of_their_own(vocab_size: int, tokenizer: Path, tmp_path: Path) -> None:
    """Of a vocabulary that is padded beyond its tokenizer the table becomes shorter, and nothing points outside."""
    config = replace(MODERNBERT, vocab_size=vocab_size)
    model = build_model(config, MaskedLmConfig())
    state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight"}
    export(state, config, max_tokens=64, tokenizer_folder=tokenizer, out=tmp_path / "hf", card="")
    built = gliner.build(GlinerConfig(**SMALL), tmp_path / "hf")
    ids = built.data_processor.transformer_tokenizer.convert_tokens_to_ids(["[FLERT]", "<<ENT>>", "<<SEP>>"])
    assert ids == [512, 513, 514] and built.config.class_token_index == 513
    table = built.model.token_rep_layer.bert_layer.model.get_input_embeddings().weight
    assert table.shape[0] == 515 == built.config.vocab_size
    assert torch.equal(table[:512], state["model.embeddings.tok_embeddings.weight"][:512])


@pytest.mark.runs
def test_the_same_seed_is_the_same_model(models: dict[str, Path], tmp_path: Path) -> None:
    files = write_files(tmp_path)
    recipe = write_recipe(tmp_path / "names.yaml", **files, **SMALL | {"dropout": 0.3}, max_steps=3)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        gliner.train(str(recipe), str(models["modernbert"]), [f"name={name}", f"seed={seed}"])
    a, b, c = (load_file(tmp_path / f"runs/{name}/model/model.safetensors") for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)
    with pytest.raises(ConfigError, match="holds a finished run"):
        gliner.train(str(recipe), str(models["modernbert"]), ["name=a"])


@pytest.mark.runs
def test_a_bert_that_is_stored_in_half_precision_and_odd_sentences(models: dict[str, Path], tmp_path: Path) -> None:
    """Trained in fp32 whatever the file has; odd sentences are counted; types that training has not are apart."""
    shutil.copytree(models["bert"], tmp_path / "half")
    weights = tmp_path / "half/model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    about = json.loads((tmp_path / "half/config.json").read_text(encoding="utf-8"))
    (tmp_path / "half/config.json").write_text(json.dumps(about | {"dtype": "float16"}), encoding="utf-8")
    files = write_files(tmp_path)
    odd = "aki\tB-a-person\n" + "nabe\tO\n" * 90 + "kelo\tB-place\n\n...\tO\n\n\u200b\tO\naki\tI-river\n"
    with (tmp_path / "dev.conll").open("a", encoding="utf-8") as file:
        file.write(f"\n{odd}")
    recipe = write_recipe(tmp_path / "names.yaml", **files, **SMALL, max_steps=2, zero_shot=["place"])
    gliner.train(str(recipe), str(tmp_path / "half"), ["name=half", "max_len=80"])
    result = json.loads((tmp_path / "runs/half/result.json").read_text(encoding="utf-8"))
    counts = result["counts"]["dev"]
    assert (counts["texts"], counts["empty"], counts["loose_tags"]) == (42, 1, 1)
    assert (counts["truncated"], counts["lost"]) == (1, 1)
    assert counts["zero_shot_entities"] > 5 and result["counts"]["train"]["zero_shot_entities"] == 0
    assert result["labels"] == ["a person"] and result["unseen"] == {"dev": ["place", "river"]}
    assert {*result["figures"]["dev"]} == {*gliner.METRICS}
    with safe_open(tmp_path / "runs/half/model/model.safetensors", framework="pt") as stored:
        assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"F32"}  # noqa: SIM118


# --- what it reads ---------------------------------------------------------------------------------------------------


def test_types_are_read_as_words(tmp_path: Path) -> None:
    write_files(tmp_path)
    corpus = read_corpus(config_of(tmp_path, labels={"place": "somewhere"}))
    assert corpus.labels == ("a person", "somewhere")
    entities = [entity for item in corpus.items["train"] for entity in item.entities]
    assert {entity.last - entity.first for entity in entities if entity.label == "somewhere"} == {1}
    assert corpus.counts["train"].entities == len(entities)


def test_types_that_training_must_not_see_are_measured_apart(tmp_path: Path) -> None:
    write_files(tmp_path)
    corpus = read_corpus(config_of(tmp_path, zero_shot=["place"], max_width=1))
    assert corpus.labels == ("a person",) and corpus.zero_shot == {"train": (), "dev": ("place",)}
    assert {entity.label for item in corpus.items["train"] for entity in item.entities} == {"a person"}
    assert corpus.counts["dev"].wide == corpus.counts["dev"].zero_shot_entities > 0


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("aki\tB-x\nnabe\n", {}, "train.conll: line 2: 'nabe' is no word with a tag"),
        ("aki\tperson\n", {}, "line 1: the tag 'person' is none of O, B-x"),
        ("nabe\tO\n", {}, "has no entity to learn from. Name"),
        ("...\tO\n", {}, "holds no sentence with a letter"),
        ("aki\tB-x\n", {"zero_shot": ["x"]}, "has no entity to learn from but those of zero_shot"),
        ("aki\tB-x\n", {"zero_shot": ["y"]}, "zero_shot: no file has an entity of type y"),
    ],
)
def test_files_that_teach_nothing_are_refused(text: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "dev.conll").write_text("aki\tB-x\n", encoding="utf-8")
    (tmp_path / "train.conll").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_corpus(config_of(tmp_path, **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validation": {}}, "validation: nothing to measure on"),
        ({"train": "names.json"}, "train=names.json: of which kind"),
        ({"labels": {"a": " "}}, "labels.a: names nothing"),
        ({"labels": {"a": "thing", "b": "thing"}}, "several types are read as 'thing'"),
        ({"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
        ({"max_steps": 0}, "max_steps=0: must be at least 1"),
        ({"others_lr": 0.0}, "others_lr=0.0: must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], message: str) -> None:
    given = {"train": "a.conll", "validation": {"dev": "b.conll"}} | keys
    assert any(message in each for each in gliner_problems(GlinerConfig(**given)))
    assert not list(gliner_problems(GlinerConfig(train="a.conll", validation={"dev": "b.conll"})))


def test_the_recipe_is_taken() -> None:
    config = runs.read_settings(GlinerConfig, gliner_problems, ROOT / "yamls/gliner/wnut17.yaml", ["seed=3"])
    assert config.labels == {"creative-work": "creative work"} and config.seed == 3


def pieces(folder: Path, words: list[str]) -> list[list[str]]:
    """Of each word alone, as a list of words is read."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoding = tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
    return [[t for t, w in zip(encoding.tokens, encoding.word_ids, strict=True) if w == n] for n in range(len(words))]


def test_words_of_a_list_have_the_space_before_them(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "copy")
    words = ["beru", "tinda", "kelo"]
    running = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("x beru tinda kelo").tokens
    assert not any(first[0].startswith("Ġ") for first in pieces(tmp_path / "copy", words))  # the trap
    assert with_leading_space(tmp_path / "copy")
    found = [piece for each in pieces(tmp_path / "copy", words) for piece in each]
    assert found == running[-len(found) - 1 : -1] and found[0].startswith("Ġ")  # before [SEP]


def test_no_space_is_put_into_a_word_that_another_step_cuts_first(tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "copy")
    file = tmp_path / "copy/tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, raw["pre_tokenizer"]],
    }
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert with_leading_space(tmp_path / "copy")
    ((first, *rest),) = pieces(tmp_path / "copy", ["b12a"])
    assert first.startswith("Ġ") and "Ġ" not in "".join(rest)


def test_a_tokenizer_that_is_not_byte_level_is_left_alone(tmp_path: Path) -> None:
    text = json.dumps({"pre_tokenizer": {"type": "BertPreTokenizer"}})
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert not with_leading_space(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == text


ITEMS = [Item((f"w{number}", "x"), ((Entity(0, 0, "a"),) if number % 3 else ())) for number in range(10)]
LABELS = ("a", "b", "c", "d")


def test_what_training_sees_is_a_function_of_the_seed() -> None:
    """Every sentence once in each pass, in another order; asked for its own types and for some others."""
    config = GlinerConfig(max_steps=50, batch_size=4)
    visits, again, other = (Visits(ITEMS, LABELS, replace(config, seed=seed)) for seed in (1, 1, 2))
    seen = [visits[number] for number in range(len(visits))]
    assert len(seen) == 200 and [again[number] for number in reversed(range(200))] == seen[::-1]
    assert [other[number] for number in range(200)] != seen
    passes = [[each["tokenized_text"][0] for each in seen[at : at + 10]] for at in range(0, 200, 10)]
    assert all(sorted(each) == sorted(passes[0]) for each in passes) and passes[0] != passes[1]
    assert all({label for *_, label in each["ner"]} <= {*each["ner_labels"]} for each in seen)
    empty = [each["ner_labels"] for each in seen if not each["ner"]]
    assert all(empty), "a sentence without entities is asked for something too"
    asked = Counter(label for each in empty for label in each)
    assert all(20 < asked[label] < 65 for label in LABELS)  # of 80, half and a little
    assert len({tuple(each["ner_labels"]) for each in seen}) > 20


def test_no_more_types_are_asked_than_the_model_takes() -> None:
    visits = Visits(ITEMS, LABELS, GlinerConfig(max_types=2, ask_absent=1.0))
    asked = [visits[number]["ner_labels"] for number in range(100)]
    assert {len(each) for each in asked} == {2}
    assert all("a" in each for number, each in enumerate(asked) if visits[number]["ner"])
    none = Visits(ITEMS, LABELS, GlinerConfig(ask_absent=0.0))
    assert {len(none[number]["ner_labels"]) for number in range(100)} == {1}


def test_spans_and_tags_are_each_others_inverse() -> None:
    entities = (Entity(0, 1, "a"), Entity(2, 2, "a"), Entity(4, 5, "b"))
    tags = tags_of(entities, 6)
    assert tags == ["B-a", "I-a", "B-a", "O", "B-b", "I-b"]
    assert tuple(Entity(each.first, each.end - 1, each.kind) for each in spans(tags)) == entities


# --- what is refused -------------------------------------------------------------------------------------------------


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "names.yaml", **write_files(tmp_path))
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'modernbert-train\[gliner\]'"):
        gliner.train(str(recipe), "anything", [])


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "names.yaml", **write_files(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="trains in one process"):
        gliner.train(str(recipe), "anything", [])


def test_a_threshold_of_zero_is_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not the recipe's: whoever asks for everything that the model finds would get a part of it without a word."""
    asked: list[float] = []

    class Model:
        def inference(self, texts: list[str], labels: list[str], *, flat_ner: bool, threshold: float) -> list[Any]:
            asked.append(threshold)
            return [[] for _ in texts]

    recipe = write_recipe(tmp_path / gliner.SETTINGS, **write_files(tmp_path))
    config = gliner.read_settings(gliner.GlinerConfig, gliner.gliner_problems, recipe)
    monkeypatch.setattr(gliner, "open_run", lambda *_: tmp_path)
    monkeypatch.setattr(gliner, "load", lambda *_: Model())
    for threshold in (0.0, None, 0.001):
        gliner.predict("run", ["text"], ["person"], threshold)
    assert asked == [0.0, config.threshold, 0.001]
    with pytest.raises(
        ConfigError, match=r"--labels threshold=0.001: no type of entities. `predict` takes --threshold"
    ):
        gliner.predict("run", ["text"], ["person", "threshold=0.001"])
    with pytest.raises(ConfigError, match="--threshold 2: a share from 0 to 1"):
        gliner.predict("run", ["text"], ["person"], 2)
    assert main(["gliner", "predict", "run", "text", "--labels", "person", "--threshold", "0.25"]) == 0
    assert asked[3:] == [0.25]


@pytest.mark.runs
def test_a_model_without_a_tokenizer_or_that_sees_one_side_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["modernbert"], tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(DataError, match=r"tokenizer.json: no such file"), runs.exported_encoder(f"{tmp_path}/bare"):
        pass
    model = build_model(MODERNBERT, MaskedLmConfig())
    state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight"}
    options: dict[str, Any] = {"max_tokens": 64, "tokenizer_folder": models["modernbert"], "card": ""}
    export(state, MODERNBERT, order="causal", out=tmp_path / "decoder", **options)
    with pytest.raises(ConfigError, match="a decoder"), runs.exported_encoder(f"{tmp_path}/decoder"):
        pass


def test_what_is_no_run_or_no_label_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gliner", "predict", str(tmp_path), "text"]) == 65
    assert "no run of `gliner train`" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    write_recipe(tmp_path / "gliner.yaml", **write_files(tmp_path))
    with pytest.raises(ConfigError, match="--labels: one names nothing"):
        gliner.predict(str(tmp_path), ["text"], ["person", ""])
    assert main(["gliner", "train", "recipe.yaml", "--model", "m", "three"]) == 78
