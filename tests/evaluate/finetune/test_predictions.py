"""Predictions of each text, the chosen epoch, lists of words, and tags that are not spans.

If this breaks, users cannot submit a test set or inspect errors, or the exported epoch is not the chosen one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.tensor_files import read_tensors
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.read_texts import read_splits
from modernbert_train.evaluate.finetune.shards import prepare
from tests.support.finetuning import Tuning, metrics, predictions
from tests.support.finetuning_fixtures import Hub
from tests.support.labelled import BAD, GOOD, PLAIN, json_lines, sentences, write_splits, write_tsv
from tests.support.labelled_texts import documents, labels_in, prepared_of, task_of

OTHER = {"up": "down", "down": "up"}


@pytest.mark.runs
def test_the_best_epoch_is_what_is_exported_and_predicted(tuning: Tuning) -> None:
    """Classes of dev are wrong, so training increases its loss: the first epoch is the best."""
    from transformers import pipeline

    task = tuning.write(best="loss", epochs=4, id_column="id", predict={"more": str(tuning.folder / "more.tsv")})
    dev, more = sentences(40, 2), [text for text, _ in sentences(9, 7)]
    more[4] = " "
    rows = [(text, OTHER[label], f"t{n}") for n, (text, label) in enumerate(dev)]
    write_tsv(tuning.folder / "dev.tsv", ("text", "label", "id"), rows)
    write_tsv(tuning.folder / "more.tsv", ("id", "text"), [(n, text) for n, text in enumerate(more)])
    result = tuning.run(task, "modernbert")
    folder = tuning.tone
    epochs = [entry for entry in metrics(folder) if entry["kind"] == "evaluation"]
    losses = [entry["figures"]["loss"] for entry in epochs]
    assert len(losses) == 4 and losses[0] == min(losses) < losses[-1] - 0.1
    assert result["figures"]["dev"] == epochs[0]["figures"] and result["counted"]["epoch"] == 1

    kept = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert kept == {f"step-{epochs[n]['step']:08}" for n in (0, -1)}, "only the best and the last"
    mine = read_tensors(next((folder / "checkpoints" / result["counted"]["checkpoint"]).glob("*model*.safetensors")))
    served = read_tensors(folder / "hf" / "model.safetensors")
    assert np.array_equal(mine["classifier.weight"], served["classifier.weight"])

    told = predictions(folder, "dev")
    assert [(each["id"], each["line"], each["label"]) for each in told] == [
        (name, n + 2, label) for n, (_, label, name) in enumerate(rows)
    ]
    right = np.mean([each["prediction"] == each["label"] for each in told])
    assert right == pytest.approx(result["figures"]["dev"]["accuracy"])
    serve = pipeline("text-classification", str(folder / "hf"), device="cpu")
    unseen = predictions(folder, "more")
    assert unseen[4] == {"line": 6, "id": "4", "prediction": None, "scores": None}, "without a letter, in its place"
    assert all("label" not in each for each in unseen) and len(unseen) == 9
    for text, each in zip([text for text, _ in dev] + more, told + unseen, strict=True):
        if each["prediction"] is not None:
            (said,) = serve([text])
            assert said["label"] == each["prediction"]
            assert said["score"] == pytest.approx(each["scores"][each["prediction"]], abs=1e-4)
    before = (folder / "predictions.jsonl").read_bytes()
    assert tuning.run(task, "modernbert") == result, "training does not continue from the best epoch"
    assert (folder / "predictions.jsonl").read_bytes() == before


@pytest.mark.runs
def test_a_metric_that_is_undefined_at_every_epoch_does_not_lose_the_run(tuning: Tuning) -> None:
    """Such as the correlation with one score, or of a rate that predicts one: then the last epoch counts."""
    for name, number in (("train", 40), ("dev", 12)):
        rows = [(text, n % 5 if name == "train" else 1) for n, (text, _) in enumerate(sentences(number, 3))]
        write_tsv(tuning.folder / f"{name}.tsv", ("text", "label"), rows)
    task = tuning.write(kind="regression", best="pearson", epochs=2)
    result = tuning.run(task, "bert")
    assert result["figures"]["dev"]["pearson"] is None and result["counted"]["epoch"] == 2
    assert "warning: best=pearson: undefined at every epoch, so the last one counts" in tuning.said
    assert "UserWarning" not in tuning.said


@pytest.mark.runs
def test_a_class_that_only_the_measured_texts_have_is_never_predicted_correctly(tuning: Tuning) -> None:
    """Of several classes too, though nothing is predicted of such a text; training may have one class alone."""

    def written(seed: int, other: list[str]) -> str:
        return json_lines({"text": text, "label": ["a"] if up == "up" else other} for text, up in sentences(40, seed))

    files = write_splits(tuning.folder, "jsonl", written(5, []), written(3, ["new"]))
    task = tuning.write(kind="multi-label", metrics=["accuracy", "micro_f1", "macro_f1"], epochs=1, **files)
    result = tuning.run(task, "bert")
    told = predictions(tuning.tone, "dev")
    known = np.mean([each["label"] == ["a"] for each in told])
    assert {tuple(each["label"]) for each in told} == {("a",), ("new",)} and result["unseen"] == {"dev": ["new"]}
    found = result["figures"]["dev"]
    right = np.mean([each["label"] == each["prediction"] for each in told])
    assert found["accuracy"] == pytest.approx(right) and right <= known < 1
    of_a = 2 * right * 40 / sum(len(each["prediction"]) + (each["label"] == ["a"]) for each in told)
    assert found["macro_f1"] == pytest.approx(of_a / 2) and found["micro_f1"] <= of_a
    assert "of classes missing in training" in tuning.said


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("regression", lambda up: 2.0 * up),
        pytest.param("multi-label", lambda up: "a,b" if up else "b", marks=pytest.mark.slow),
    ],
)
def test_scores_and_several_classes_are_predicted(kind: str, label: Any, tuning: Tuning) -> None:
    for name, seed in (("train", 1), ("dev", 2)):
        rows = [(text, label(up == "up")) for text, up in sentences(96, seed)]
        write_tsv(tuning.folder / f"{name}.tsv", ("text", "label"), rows)
    result = tuning.run(tuning.write(kind=kind, epochs=7), "modernbert")
    told = predictions(tuning.tone, "dev")
    if kind == "regression":
        found = np.corrcoef([each["prediction"] for each in told], [each["label"] for each in told])[0, 1]
        assert found == pytest.approx(result["figures"]["dev"]["pearson"], abs=1e-4) and found > 0.8
        assert all(each["scores"] == {"score": each["prediction"]} for each in told)
    else:
        assert np.mean([each["prediction"] == each["label"] for each in told]) > 0.8
        assert all((each["scores"]["a"] > 0.5) == ("a" in each["prediction"]) for each in told)


def test_lists_of_words_and_tags_are_what_a_conll_file_is(tmp_path: Path, tokenizer: Path) -> None:
    rows = [(["aki", "ruto", "kelo"], ["B-x", "I-x", "O"]), (["lamu"], ["O"]), (["domi", "nabe"], ["O", "B-y"])]
    blocks = ["".join(f"{w}\t{t}\n" for w, t in zip(*row, strict=True)) for row in rows]
    texts = {
        "conll": "\n".join(blocks),
        "jsonl": json_lines({"tokens": words, "tags": tags} for words, tags in rows),
    }
    found = []
    for end, text in texts.items():
        task = task_of(tmp_path, kind="tokens", **write_splits(tmp_path, end, text))
        prepared = prepare(task, tokenizer, 32, tmp_path / end / "task")
        folder = prepared.folder / "train"
        found.append((prepared.labels, documents(folder, tokenizer), labels_in(folder, tokenizer)))
    assert found[0] == found[1] and found[0][0] == ("O", "B-x", "B-y", "I-x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "tags is 1 tags for 2 words"),
        ({"tokens": "a b", "tags": ["O"]}, "tokens is 'a b', and not a list of words"),
        ({"tokens": [], "tags": []}, "tokens is an empty list. Remove the row"),
        ({"tokens": ["a", None], "tags": ["O", "O"]}, "word 2 of tokens is None"),
        ({"tokens": [" "], "tags": ["O"]}, "word 1 of tokens is ' '"),
        ({"tokens": ["a b"], "tags": ["O"]}, "a word with a space in it"),
        ({"tokens": ["a"], "tags": ["NN"]}, "the tag 'NN' is none of O, B-x.*set metrics to .accuracy"),
        ({"tokens": ["a"], "tags": [None]}, "neither a text nor a whole number"),
        ({"words": ["a"], "tags": ["O"]}, "no column 'tokens' among 'words', 'tags'"),
    ],
)
def test_lists_that_are_none_are_refused_with_their_line(
    line: dict[str, Any], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    rows = [{"tokens": ["aki"], "tags": ["B-x"]}, {"tokens": ["aki"], "tags": ["O"]}, line]
    with pytest.raises(DataError, match=f"line 3.*{message}"):
        prepared_of(tmp_path, tokenizer, kind="tokens", **write_splits(tmp_path, "jsonl", json_lines(rows)))


def test_words_and_tags_of_the_hub_have_the_names_of_its_classes(hub: Hub) -> None:
    """CoNLL-2003 and similar sets: lists of words, and of numbers with names in the dataset."""
    import datasets

    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-x", "I-x"]))
    rows = [{"tokens": ["aki", "ruto"], "ner_tags": [1, 2]}, {"tokens": ["kelo"], "ner_tags": [0]}]
    hub(rows, {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags}, test="ner_tags")
    keys = {"validation": {"dev": "validation"}, "predict": {"test": "test"}, "label_column": "ner_tags"}
    task = TaskConfig(kind="tokens", data="some/entities", train="train", **keys)
    labels = kind_of(task.kind).numbers(task, read_splits(task))
    assert set(labels.names) == {"O", "B-x", "I-x"}
    told = [[labels.names[number] for number in value] for value in labels.values["dev"]]
    assert told == [["B-x", "I-x"], ["O"]]
    assert [value.tolist() for value in labels.values["test"]] == [[0, 0], [0]]


@pytest.mark.runs
@pytest.mark.parametrize("end", ["conll", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_parts_of_speech_are_learned(end: str, tuning: Tuning) -> None:
    """Tags that are not spans; whole numbers are classes by their place in labels."""
    names = ["PLAIN", "GOOD", "BAD-ish"]
    kinds = dict.fromkeys(GOOD, 1) | dict.fromkeys(BAD, 2) | dict.fromkeys(PLAIN, 0)

    def written(seed: int) -> str:
        rows = [text.split() for text, _ in sentences(96, seed)]
        if end == "conll":
            return "\n".join("".join(f"{word}\t{names[kinds[word]]}\n" for word in row) for row in rows)
        return json_lines({"w": row, "pos": [kinds[word] for word in row]} for row in rows)

    keys = write_splits(tuning.folder, end, written(1), written(2)) | {"epochs": 5}
    columns = {} if end == "conll" else {"text_columns": ["w"], "label_column": "pos", "labels": names}
    task = tuning.write(kind="tokens", metrics=["accuracy", "macro_f1"], **keys, **columns)
    result = tuning.run(task, "modernbert")
    assert {*result["labels"]} == {*names} and result["figures"]["dev"]["macro_f1"] > 0.8
    if end == "conll":
        assert "set metrics to [accuracy] or [macro_f1]" in tuning.refused(
            tuning.write(kind="tokens", **keys), "modernbert", "name=other", code=65
        )


# --- relations of two marked spans ---------------------------------------------------------------------------------


def marked(number: int, seed: int) -> list[tuple[str, str]]:
    """Return texts of three classes, determined by the words of both marked spans."""
    draw, found = random.Random(seed), []
    for _ in range(number):
        label = draw.choice(("Other", "up(e1,e2)", "down(e1,e2)"))
        words = {"Other": PLAIN, "up(e1,e2)": GOOD, "down(e1,e2)": BAD}[label]
        first, second = (f"<e{n}>{draw.choice(words)}</e{n}>" for n in (1, 2))
        rest = [" ".join(draw.choices(PLAIN, k=draw.randint(1, 4))) for _ in range(3)]
        found.append((f"{rest[0]} {first} {rest[1]} {second}{rest[2]}", label))
    return found


@pytest.mark.runs
def test_a_relation_is_learned_and_measured_without_the_class_that_is_none(tuning: Tuning) -> None:
    """Also for a text far longer than the model reads: it is cut around the spans, or it could not be learned."""
    for name, number in (("train", 240), ("dev", 60)):
        write_tsv(tuning.folder / f"{name}.tsv", ("text", "label"), marked(number, number))
    long = f"{'nabe ' * 90}<e1>aki</e1> ruto <e2>beru</e2> {'mosa ' * 90}"
    with (tuning.folder / "dev.tsv").open("a") as file:
        file.write(f"{long}\tup(e1,e2)\n")
    task = tuning.write(kind="relation", epochs=8, metrics=["relation_f1", "macro_f1"], max_tokens=40)
    result = tuning.run(task, "modernbert")
    assert result["labels"] == ["Other", "down(e1,e2)", "up(e1,e2)"]
    assert result["figures"]["dev"]["relation_f1"] > 0.8 and result["counts"]["dev"]["truncated"] == 1
    lines = predictions(tuning.tone, "dev")
    told, so = ([each[key] for each in lines] for key in ("prediction", "label"))
    right = sum(a == b != "Other" for a, b in zip(told, so, strict=True))
    some = sum(each != "Other" for each in (*told, *so))
    assert result["figures"]["dev"]["relation_f1"] == pytest.approx(2 * right / some)
    assert told[-1] == "up(e1,e2)"  # the first 40 tokens are irrelevant
    assert json.loads((tuning.tone / "hf/config.json").read_text())["id2label"]["0"] == "Other"


@pytest.mark.runs
@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        ("aki <e1>beru</e1> domi", "Other", "line 2: the spans are not marked. Write <e1>...</e1>"),
        ("<e1>aki</e1> <e2> </e2>", "Other", "line 2: the spans are not marked"),
        ("<e1>aki</e1> <e1>ruto</e1> <e2>beru</e2>", "Other", "line 2: the spans are not marked"),
        ("<e1>aki</e1> <e2>ruto</e2>", "x", "relation_f1 leaves out the class without a relation, and none is called"),
    ],
)
def test_spans_that_are_not_marked_are_refused_with_their_line(
    text: str, label: str, message: str, tuning: Tuning
) -> None:
    rows = [(text, label), ("<e1>aki</e1> <e2>ruto</e2>", "y")]
    task = tuning.write(kind="relation")
    for name, each in (("train", rows), ("dev", rows[1:])):
        write_tsv(tuning.folder / f"{name}.tsv", ("text", "label"), each)
    assert message in tuning.refused(task, "bert", code=65)
