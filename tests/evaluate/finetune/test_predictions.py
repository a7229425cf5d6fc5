"""Predictions of each text, the chosen epoch, lists of words, and tags that are not spans.

If this breaks, users cannot submit a test set or inspect errors, or the exported epoch is not the chosen one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.tensor_files import read_tensors
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.read import read_splits
from modernbert_train.evaluate.finetune.shards import prepare
from tests.support.finetuning import finetune, metrics, predictions
from tests.support.labelled import PLAIN, WriteTask, sentences, write_tsv
from tests.support.labelled_texts import documents, task_of

OTHER = {"up": "down", "down": "up"}


@pytest.mark.runs
def test_the_best_epoch_is_what_is_exported_and_predicted(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path
) -> None:
    """Classes of dev are wrong, so training increases its loss: the first epoch is the best."""
    from transformers import pipeline

    task = write_task(best="loss", epochs=4, id_column="id", predict={"more": str(tmp_path / "more.tsv")})
    dev, more = sentences(40, 2), [text for text, _ in sentences(9, 7)]
    more[4] = " "
    rows = [(text, OTHER[label], f"t{n}") for n, (text, label) in enumerate(dev)]
    write_tsv(tmp_path / "dev.tsv", ("text", "label", "id"), rows)
    write_tsv(tmp_path / "more.tsv", ("id", "text"), [(n, text) for n, text in enumerate(more)])
    result = finetune(task, models["modernbert"], tmp_path / "runs")
    folder = tmp_path / "runs" / "tone"
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
    assert finetune(task, models["modernbert"], tmp_path / "runs") == result, (
        "training does not continue from the best epoch"
    )
    assert (folder / "predictions.jsonl").read_bytes() == before


@pytest.mark.runs
def test_a_metric_that_is_undefined_at_every_epoch_does_not_lose_the_run(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the correlation with one score, or of a rate that predicts one: then the last epoch counts."""
    for name, number in (("train", 40), ("dev", 12)):
        rows = [(text, n % 5 if name == "train" else 1) for n, (text, _) in enumerate(sentences(number, 3))]
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), rows)
    task = write_task(kind="regression", best="pearson", epochs=2)
    result = finetune(task, models["bert"], tmp_path / "runs")
    assert result["figures"]["dev"]["pearson"] is None and result["counted"]["epoch"] == 2
    said = capsys.readouterr()
    assert "warning: best=pearson: undefined at every epoch, so the last one counts" in said.out
    assert "UserWarning" not in said.err


@pytest.mark.runs
def test_a_class_that_only_the_measured_texts_have_is_never_predicted_correctly(
    write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several classes too, though nothing is predicted of such a text; training may have one class alone."""
    for name, other in (("train", []), ("dev", ["new"])):
        lines = [{"text": text, "label": ["a"] if up == "up" else other} for text, up in sentences(40, len(name))]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"train": f"{tmp_path}/train.jsonl", "validation": {"dev": f"{tmp_path}/dev.jsonl"}}
    task = write_task(kind="multi-label", metrics=["accuracy", "micro_f1", "macro_f1"], epochs=1, **files)
    result = finetune(task, models["bert"], tmp_path / "runs")
    told = predictions(tmp_path / "runs/tone", "dev")
    known = np.mean([each["label"] == ["a"] for each in told])
    assert {tuple(each["label"]) for each in told} == {("a",), ("new",)} and result["unseen"] == {"dev": ["new"]}
    found = result["figures"]["dev"]
    right = np.mean([each["label"] == each["prediction"] for each in told])
    assert found["accuracy"] == pytest.approx(right) and right <= known < 1
    of_a = 2 * right * 40 / sum(len(each["prediction"]) + (each["label"] == ["a"]) for each in told)
    assert found["macro_f1"] == pytest.approx(of_a / 2) and found["micro_f1"] <= of_a
    assert "of classes missing in training" in capsys.readouterr().out


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("regression", lambda up: 2.0 * up),
        pytest.param("multi-label", lambda up: "a,b" if up else "b", marks=pytest.mark.slow),
    ],
)
def test_scores_and_several_classes_are_predicted(
    kind: str, label: Any, write_task: WriteTask, models: dict[str, Path], tmp_path: Path
) -> None:
    for name, seed in (("train", 1), ("dev", 2)):
        write_tsv(tmp_path / f"{name}.tsv", ("text", "label"), [(t, label(c == "up")) for t, c in sentences(96, seed)])
    result = finetune(write_task(kind=kind, epochs=7), models["modernbert"], tmp_path / "runs")
    told = predictions(tmp_path / "runs" / "tone", "dev")
    if kind == "regression":
        found = np.corrcoef([each["prediction"] for each in told], [each["label"] for each in told])[0, 1]
        assert found == pytest.approx(result["figures"]["dev"]["pearson"], abs=1e-4) and found > 0.8
        assert all(each["scores"] == {"score": each["prediction"]} for each in told)
    else:
        assert np.mean([each["prediction"] == each["label"] for each in told]) > 0.8
        assert all((each["scores"]["a"] > 0.5) == ("a" in each["prediction"]) for each in told)


def test_lists_of_words_and_tags_are_what_a_conll_file_is(tmp_path: Path, tokenizer: Path) -> None:
    rows = [(["aki", "ruto", "kelo"], ["B-x", "I-x", "O"]), (["lamu"], ["O"]), (["domi", "nabe"], ["O", "B-y"])]
    folders = {}
    for end in ("conll", "jsonl"):
        for name in ("train", "dev"):
            lines = ["".join(f"{w}\t{t}\n" for w, t in zip(*row, strict=True)) for row in rows]
            if end == "jsonl":
                lines = [json.dumps({"tokens": words, "tags": tags}) for words, tags in rows]
            (tmp_path / f"{name}.{end}").write_text("\n".join(lines) + "\n")
        keys = {"kind": "tokens", "train": f"{tmp_path}/train.{end}", "validation": {"dev": f"{tmp_path}/dev.{end}"}}
        folders[end] = prepare(task_of(tmp_path, **keys), tokenizer, 32, tmp_path / end / "task")
    assert folders["conll"].labels == folders["jsonl"].labels == ("O", "B-x", "B-y", "I-x")
    found = {end: documents(each.folder / "train", tokenizer) for end, each in folders.items()}
    (ids, shards), (other_ids, other_shards) = found["conll"], found["jsonl"]
    assert [list(each) for each in ids] == [list(each) for each in other_ids]
    assert shards.labels is not None and other_shards.labels is not None
    assert all(shards.labels[n].tolist() == other_shards.labels[n].tolist() for n in range(3))


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
    for name in ("train", "dev"):
        rows = [{"tokens": ["aki"], "tags": ["B-x"]}, {"tokens": ["aki"], "tags": ["O"]}, line]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"kind": "tokens", "train": f"{tmp_path}/train.jsonl", "validation": {"dev": f"{tmp_path}/dev.jsonl"}}
    with pytest.raises(DataError, match=f"line 3.*{message}"):
        prepare(task_of(tmp_path, **keys), tokenizer, 32, tmp_path / "run" / "task")


def test_words_and_tags_of_the_hub_have_the_names_of_its_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CoNLL-2003 and similar sets: lists of words, and of numbers with names in the dataset."""
    import datasets

    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-x", "I-x"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": tags})
    rows = [{"tokens": ["aki", "ruto"], "ner_tags": [1, 2]}, {"tokens": ["kelo"], "ner_tags": [0]}]

    def load(data: str, subset: str | None, split: str) -> Any:
        found = datasets.Dataset.from_list(rows, features=features)
        return found.remove_columns("ner_tags") if split == "test" else found

    monkeypatch.setattr(datasets, "load_dataset", load)
    keys = {"validation": {"dev": "validation"}, "predict": {"test": "test"}, "label_column": "ner_tags"}
    task = TaskConfig(kind="tokens", data="some/entities", train="train", **keys)
    labels = kind_of(task.kind).numbers(task, read_splits(task))
    assert set(labels.names) == {"O", "B-x", "I-x"}
    told = [[labels.names[number] for number in value] for value in labels.values["dev"]]
    assert told == [["B-x", "I-x"], ["O"]]
    assert [value.tolist() for value in labels.values["test"]] == [[0, 0], [0]]


@pytest.mark.runs
@pytest.mark.parametrize("end", ["conll", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_parts_of_speech_are_learned(
    end: str, write_task: WriteTask, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tags that are not spans; whole numbers are classes by their place in labels."""
    names = ["PLAIN", "GOOD", "BAD-ish"]
    kinds = {"aki": 1, "beru": 1, "domi": 1, "kelo": 2, "lamu": 2, "sitre": 2} | dict.fromkeys(PLAIN, 0)
    for name, seed in (("train", 1), ("dev", 2)):
        rows = [text.split() for text, _ in sentences(96, seed)]
        if end == "conll":
            text = "\n".join("".join(f"{word}\t{names[kinds[word]]}\n" for word in row) for row in rows)
        else:
            text = "".join(json.dumps({"w": row, "pos": [kinds[word] for word in row]}) + "\n" for row in rows)
        (tmp_path / f"{name}.{end}").write_text(text)
    keys = {"train": f"{tmp_path}/train.{end}", "validation": {"dev": f"{tmp_path}/dev.{end}"}, "epochs": 5}
    columns = {} if end == "conll" else {"text_columns": ["w"], "label_column": "pos", "labels": names}
    task = write_task(kind="tokens", metrics=["accuracy", "macro_f1"], **keys, **columns)
    result = finetune(task, models["modernbert"], tmp_path / "runs")
    assert {*result["labels"]} == {*names} and result["figures"]["dev"]["macro_f1"] > 0.8
    if end == "conll":
        task = write_task(kind="tokens", **keys)
        words = [f"runs_folder={tmp_path}/other", "name=tone", "compute.device=cpu"]
        assert main(["finetune", str(task), "--model", str(models["modernbert"]), *words]) == 65
        assert "set metrics to [accuracy] or [macro_f1]" in capsys.readouterr().err
