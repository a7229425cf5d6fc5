"""BEIR folders and files of pairs: errors are reported with file and line before anything heavy is imported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.config.tools.retrieval import EvaluateConfig, RetrievalConfig, retrieval_problems
from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval.beir import joined, read_beir
from tests.support.beir import WriteBeir
from tests.support.front_door import Cli
from tests.support.paths import ROOT

HEAD = "query-id\tcorpus-id\tscore\n"
CORPUS, QUERIES = {"d1": "one", "d2": "two"}, {"q1": "which", "q2": "what"}


def test_a_folder_is_read_and_counted(write_beir: WriteBeir) -> None:
    test = [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d2", 0)]
    folder = write_beir(CORPUS | {"d3": ""}, QUERIES | {"q3": "who"}, test=test)
    found = read_beir(folder, "test")
    assert found.qrels == {"q1": {"d1": 2, "d2": 0}, "q2": {"d2": 0}} and found.queries == QUERIES
    assert list(found.texts(2)) == [["one", "two"], [""]]
    assert found.counts == {
        "documents": 3, "documents_without_text": 1, "queries": 2, "queries_without_judgement": 1,
        "queries_without_relevant_document": 1, "judgements": 3, "relevant": 1,
    }  # fmt: skip


def test_a_document_is_its_title_and_its_text() -> None:
    assert [joined({"title": title, "text": " b "}) for title in ("a", "", None)] == ["a  b", "b", "b"]
    assert joined({"text": "b"}) == "b"


def append(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no qrels": (lambda folder: (folder / "qrels/test.tsv").unlink(), "has no qrels/test.tsv, so nothing says which"),
    "other split": (lambda folder: (folder / "qrels/test.tsv").rename(folder / "qrels/dev.tsv"), "its splits are dev"),
    "no corpus": (lambda folder: (folder / "corpus.jsonl").unlink(), "has no corpus.jsonl"),
    "empty corpus": (lambda folder: (folder / "corpus.jsonl").write_text(""), "corpus.jsonl: is empty"),
    "empty qrels": (lambda f: (f / "qrels/test.tsv").write_text(HEAD), "no judgement"),
    "no head": (lambda folder: (folder / "qrels/test.tsv").write_text("q1\td1\t1\n"), "Begin with the names of"),
    "not JSON": (append("corpus.jsonl", "{\n"), "corpus.jsonl: line 3: not JSON"),
    "no object": (append("queries.jsonl", "[1]\n"), "queries.jsonl: line 3: list, not an object"),
    "no id": (append("corpus.jsonl", '{"text": "a"}\n'), "corpus.jsonl: line 3: no column '_id' among"),
    "no text": (append("corpus.jsonl", '{"_id": "d3"}\n'), "corpus.jsonl: line 3: no column 'text' among"),
    "title": (append("corpus.jsonl", '{"_id": "d3", "text": "", "title": 3}\n'), "line 3: title is no text"),
    "document twice": (append("corpus.jsonl", '{"_id": "d1", "text": ""}\n'), "3: the _id d1 is on line 1 too"),
    "unknown document": (append("qrels/test.tsv", "q1\td9\t1\n"), "test.tsv: line 3: d9 is not in corpus.jsonl; of 2"),
    "unknown query": (append("qrels/test.tsv", "q9\td1\t1\n"), "test.tsv: line 3: q9 is not in queries.jsonl"),
    "score": (append("qrels/test.tsv", "q1\td2\tyes\n"), "line 3: the score 'yes' is no whole number"),
    "two columns": (append("qrels/test.tsv", "q1\td2\n"), "line 3 has 2 values"),
    "two scores": (append("qrels/test.tsv", "q1\td1\t0\n"), "line 3: d1 has the score 0 for q1, and 1 above"),
    "none relevant": (lambda f: (f / "qrels/test.tsv").write_text(f"{HEAD}q1\td1\t0\n"), "is relevant"),
    "not UTF-8": (lambda folder: (folder / "corpus.jsonl").write_bytes(b'{"_id": "\xff"}'), "line 1: not UTF-8"),
    "link": (lambda folder: (folder / "qrels/a.tsv").symlink_to("/etc/passwd"), "a link to /etc/passwd"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_with_its_place(name: str, write_beir: WriteBeir) -> None:
    folder = write_beir(CORPUS, QUERIES, test=[("q1", "d1", 1)])
    spoil, message = BROKEN[name]
    spoil(folder)
    with pytest.raises(DataError) as raised:
        read_beir(folder, "test")
    assert message in str(raised.value) and str(folder) in str(raised.value)


def test_the_same_judgement_twice_is_one_and_a_split_is_no_path(write_beir: WriteBeir) -> None:
    folder = write_beir(CORPUS, QUERIES, test=[("q1", "d1", 1)] * 2)
    assert read_beir(folder, "test").counts["judgements"] == 1
    with pytest.raises(DataError, match="split=../x: names a file elsewhere"):
        read_beir(folder, "../x")


# --- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_size": 1}, "batch_size=1: must be at least 2, since the negatives of a query are the other texts"),
        ({"max_tokens": 4}, "max_tokens=4: must be at least 8"),
        ({"lr": 5.0}, "lr=5.0: must be above 0 and at most 1"),
        ({"max_tokens": 16, "query_max_tokens": 32}, "query_max_tokens=32 is above max_tokens=16"),
        ({"name": "a/b"}, "name=a/b: it is a folder"),
        ({"train": []}, "train: empty"),
        ({"negative_columns": ["query"]}, "Name each column once"),
        ({"evaluate": {"a b": "x"}}, "evaluate.a b: the name is used in results"),
        ({"normalize": False}, "normalize=false: training compares cosines"),
        ({"pooling": "cls", "loss": "multi_vector"}, "pooling=cls: loss=multi_vector has one vector for each token"),
    ],
)
def test_wrong_settings_are_reported(keys: dict[str, Any], message: str) -> None:
    (said,) = retrieval_problems(RetrievalConfig(**{"train": ["a.tsv"], **keys}))
    assert message in said
    assert list(retrieval_problems(RetrievalConfig(train=["a.tsv"]))) == []
    assert list(retrieval_problems(EvaluateConfig())) == []


def test_the_recipe_is_right_but_for_its_texts_and_mistakes_are_reported_before_torch(
    tmp_path: Path, write_beir: WriteBeir, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # importing it would fail
    monkeypatch.setattr("modernbert_train.evaluate.retrieval.evaluate_retrieval.require", lambda *_: None)
    folder = write_beir(CORPUS, QUERIES, test=[("q1", "d1", 1)])
    runs, pairs = f"runs_folder={tmp_path}/runs", tmp_path / "a.tsv"
    pairs.write_text("query\tpositive\tnegative\na\tb\tc\n")
    (tmp_path / "d.txt").touch()
    (tmp_path / "empty").mkdir()
    train = ["retrieval", "train", ROOT / "yamls/retrieval/modernbert.yaml", "--model"]
    assert "train: missing" in cli(*train, "nothing", code=78).err
    for wrong, message in (
        ("d.txt", "train[0]={}: unknown file type. Name one of"),
        ("none.csv", "train[0]={}: no such file"),
        ("empty", "train[0]={}: holds no .jsonl"),
        ("beir", "train[0]={}: a BEIR folder has no hard negatives"),
    ):
        named = f"{tmp_path}/{wrong}"
        assert message.format(named) in cli(*train, "some/model", f"train=[{named}]", runs, code=65).err
    of_pairs = f"train=[{pairs}]"
    assert "frozen" in cli(*train, "frozen:some/model", of_pairs, runs, code=78).err
    assert "los" in cli(*train, "x", of_pairs, "losss=mnrl", code=78).err
    assert "KEY=VALUE" in cli(*train, "x", "lr", code=78).err
    evaluate = ["retrieval", "evaluate", folder, "--model"]
    assert "no such file" in cli(*evaluate, "gone.pt", runs, code=65).err
    assert "split" in cli(*evaluate, "some/model", "split=dev", runs, code=65).err
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/config.json").write_text('{"model_type": "gpt2"}')
    assert "gpt2" in cli(*evaluate, tmp_path / "strange", runs, code=65).err
    said = cli(*train, "some/model", of_pairs, "accumulate=8", "no_duplicates=true", code=78).err
    assert "accumulate (command line): was removed" in said and "no_duplicates (command line): was removed" in said
    (tmp_path / "runs/old/checkpoints/checkpoint-7").mkdir(parents=True)
    (tmp_path / "runs/old/retrieval.json").write_text("{}")
    said = cli(*train, "some/model", of_pairs, runs, "name=old", code=78).err
    assert "its checkpoints (checkpoint-7) cannot be resumed. Name another run with name=" in said
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["old"]


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, write_beir: WriteBeir, cli: Cli
) -> None:
    folder = write_beir(CORPUS, QUERIES, test=[("q1", "d1", 1)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = cli("retrieval", "evaluate", folder, "--model", "some/model", code=78).err
    assert "pip install 'modernbert-train[retrieval]'" in said


@pytest.mark.parametrize(
    ("module", "keys", "code", "message"),
    [
        ({"type": "own.Model", "path": ""}, [], 65, "own.Model is code of the folder, which is not run"),
        ({"type": "sentence_transformers.x", "path": "../.."}, [], 65, "lies elsewhere"),
        ({"type": "sentence_transformers.x"}, [], 65, "is damaged"),
        ({"type": "sentence_transformers.x", "path": ""}, ["pooling=cls"], 78, "pooling=cls: .* has its own"),
    ],
)
def test_code_in_a_folder_of_sentence_transformers_is_not_run(
    module: dict[str, str], keys: list[str], code: int, message: str,
    tmp_path: Path, write_beir: WriteBeir, monkeypatch: pytest.MonkeyPatch, cli: Cli,
) -> None:  # fmt: skip
    monkeypatch.setattr("modernbert_train.evaluate.retrieval.evaluate_retrieval.require", lambda *_: None)
    folder = write_beir(CORPUS, QUERIES, test=[("q1", "d1", 1)])
    (tmp_path / "model").mkdir()
    (tmp_path / "model/modules.json").write_text(json.dumps([module]))
    assert re.search(message, cli("retrieval", "evaluate", folder, "--model", tmp_path / "model", *keys, code=code).err)
