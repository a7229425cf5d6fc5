"""Questions from files to shards: windows, answers and choices, and rows that are refused or counted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.answers import _windows
from modernbert_train.evaluate.finetune.kinds import kind_of, task_problems
from modernbert_train.evaluate.finetune.read import read_splits
from modernbert_train.evaluate.finetune.shards import Prepared, prepare, warnings_of
from modernbert_train.evaluate.finetune.task import read_task
from modernbert_train.evaluate.label_sidecar import read_texts
from tests.support.labelled import PLAIN, write_tsv
from tests.support.labelled_texts import decoded, documents

CONTEXT = "nabe ruto tinda mosa aki lebi nabe beru kelo ruto lamu domi"


def asked(number: int, answer: str | None = "aki lebi", start: int | None = None) -> dict[str, Any]:
    found = (
        [] if answer is None else [{"text": answer, "answer_start": CONTEXT.index(answer) if start is None else start}]
    )
    return {"id": f"q{number}", "question": " ruto mosa?", "answers": found}


def squad(folder: Path, *questions: dict[str, Any], name: str = "train") -> Path:
    file = folder / f"{name}.json"
    paragraphs = [{"context": CONTEXT, "qas": list(questions)}]
    file.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return file


def task_of(folder: Path, **keys: Any) -> TaskConfig:
    files = {"train": f"{folder}/train.json", "validation": {"dev": f"{folder}/dev.json"}}
    task = TaskConfig(**{"kind": "question-answering", **files, "id_column": "id", "overlap_tokens": 4} | keys)
    assert not list(task_problems(task))
    return task


def prepared_of(folder: Path, tokenizer: Path, *, most: int = 64, **keys: Any) -> Prepared:
    return prepare(task_of(folder, **keys), tokenizer, most, folder / "run" / "task")


def test_squads_json_becomes_windows_with_the_tokens_of_the_answer(tmp_path: Path, tokenizer: Path) -> None:
    """The question precedes each window; an answer counts if a window contains all of it; windows cover all tokens."""
    squad(tmp_path, asked(0), asked(1, "domi"))
    squad(tmp_path, asked(2), name="dev")
    prepared = prepared_of(tmp_path, tokenizer, most=13)
    found, shards = documents(prepared.folder / "train", tokenizer)
    assert len(found) > 2 and prepared.longest == 13 and prepared.counts["train"].texts == 2
    answers = []
    for number, ids in enumerate(found):
        assert decoded(tokenizer, ids).startswith("ruto mosa?[SEP]")
        assert shards.labels is not None
        start, end = shards.labels[number][0].tolist()
        answers += [decoded(tokenizer, ids[start - 1 : end])] if start else []  # after [CLS]
    assert {each.strip() for each in answers} == {"aki lebi", "domi"}
    (line,) = read_texts(prepared.folder / "dev")
    assert (line["id"], line["label"], line["context"]) == ("q2", ["aki lebi"], CONTEXT)
    covered = {first + n for first, number in line["windows"] for n in range(number)}
    assert covered == {*range(len(line["starts"]))}
    words = {CONTEXT[start:end].strip() for start, end in zip(line["starts"], line["ends"], strict=True)}
    assert all(word in CONTEXT for word in words)


@pytest.mark.parametrize(("tokens", "room", "overlap"), [(1, 9, 4), (9, 9, 4), (10, 9, 4), (100, 9, 8), (57, 7, 40)])
def test_windows_hold_everything_and_continue(tokens: int, room: int, overlap: int) -> None:
    """Also with an overlap that does not fit after a long question."""
    found = list(_windows(tokens, room, overlap))
    assert {n for first, number in found for n in range(first, first + number)} == {*range(tokens)}
    assert all(number <= room for _, number in found)
    shared = [first + number - second for (first, number), (second, _) in pairwise(found)]
    assert all(each >= min(overlap, room // 2) for each in shared)


def test_jsonl_and_parquet_with_transformers_columns_are_the_same_texts(tmp_path: Path, tokenizer: Path) -> None:
    """Also the hub's, which have the same rows."""
    squad(tmp_path, asked(0), asked(1, "domi"))
    rows = []
    for each in (asked(0), asked(1, "domi")):
        lists = {key: [answer[key] for answer in each["answers"]] for key in ("text", "answer_start")}
        rows.append({"id": each["id"], "question": each["question"], "context": CONTEXT, "answers": lists})
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "dev.parquet")
    files = {"squad": "train.json", "lines": "dev.jsonl", "table": "dev.parquet"}
    splits = read_splits(task_of(tmp_path, validation={name: f"{tmp_path}/{file}" for name, file in files.items()}))
    of_squad, *others = ([each._replace(place="") for each in splits[name].examples] for name in files)
    assert [(each.texts[0], each.label[0].text, each.id) for each in of_squad] == [
        ("ruto mosa?", "aki lebi", "q0"),
        ("ruto mosa?", "domi", "q1"),
    ]
    assert all(each == of_squad for each in others)


def test_an_answer_that_is_not_at_its_stated_place_is_left_out_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    """In training; for evaluation its text is compared, so it stays. If all are wrong, the file is refused."""
    squad(tmp_path, asked(0), asked(1, "domi", start=3))
    squad(tmp_path, asked(2, "domi", start=3), name="dev")
    prepared = prepared_of(tmp_path, tokenizer)
    assert [(prepared.counts[name].texts, prepared.counts[name].misplaced) for name in ("train", "dev")] == [
        (1, 1),
        (1, 1),
    ]
    assert "1 whose answer is not where answer_start says" in "\n".join(warnings_of(prepared, task_of(tmp_path)))
    _, shards = documents(prepared.folder / "dev", tokenizer)
    assert shards.labels is not None and shards.labels[0].tolist() == [[-100, -100]]
    squad(tmp_path, asked(1, "domi", start=3))
    with pytest.raises(DataError, match="none of 1 questions has an answer at the place where answer_start says"):
        prepare(task_of(tmp_path), tokenizer, 64, tmp_path / "other" / "task")


def test_a_question_without_an_answer_is_of_version_2(tmp_path: Path, tokenizer: Path) -> None:
    """In version 1 it is refused, with its place; in version 2 every window of it predicts [CLS]."""
    squad(tmp_path, asked(0), asked(1, None) | {"is_impossible": True})
    squad(tmp_path, asked(2), name="dev")
    with pytest.raises(DataError, match="line 2: has no answer.*unanswerable=true"):
        prepared_of(tmp_path, tokenizer)
    prepared = prepared_of(tmp_path, tokenizer, unanswerable=True)
    _, shards = documents(prepared.folder / "train", tokenizer)
    assert shards.labels is not None and shards.labels[1].tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("paragraph", "message"),
    [
        ({}, "is not as SQuAD's files are .KeyError: 'qas'"),
        ({"qas": [{"question": 3, "answers": []}]}, "line 1: .* is no text"),
        (
            {"qas": [{"id": "1", "question": "b", "answers": [{"text": "a"}]}]},
            "line 1: answers has an answer that lacks a text or an integer answer_start",
        ),
    ],
)
def test_broken_files_say_where(paragraph: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": "a", **paragraph}]}]}))
    squad(tmp_path, asked(0), name="dev")
    with pytest.raises(DataError, match=message):
        read_splits(task_of(tmp_path, id_column=None))


@pytest.mark.parametrize("name", ["squad", "squad2", "swag"])
def test_the_tasks_here_read_the_hubs_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the columns of the hub's datasets; otherwise a user would notice a renamed one an hour into a suite."""
    import datasets

    text, answers = datasets.Value("string"), [{"text": ["aki lebi"], "answer_start": [CONTEXT.index("aki lebi")]}]
    lists = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(datasets.Value("int32"))}
    columns: dict[str, Any] = {key: text for key in ("id", "title", "context", "question")} | {"answers": lists}
    if name == "squad2":
        answers.append({"text": [], "answer_start": []})
    rows: list[dict[str, Any]] = [
        {"id": "q0", "title": "t", "context": CONTEXT, "question": "ruto?", "answers": each} for each in answers
    ]
    if name == "swag":
        columns = {key: text for key in ("sent1", "sent2", *(f"ending{n}" for n in range(4)))}
        rows = [{key: key for key in columns} | {"label": label} for label in (3, 0)]
        columns["label"] = datasets.ClassLabel(names=["0", "1", "2", "3"])
    asked = []

    def load(data: str, subset: str | None, split: str) -> Any:
        asked.append((data, subset, split))
        return datasets.Dataset.from_list(rows, features=datasets.Features(columns))

    monkeypatch.setattr(datasets, "load_dataset", load)
    task, _ = read_task(name, [])
    splits = read_splits(task)
    labels = kind_of(task.kind).numbers(task, splits)
    assert [split for _, _, split in asked] == ["train", "validation"]
    first = CONTEXT.index("aki")
    expected: list[list[int]] = [[3], [0]] if name == "swag" else [[first, first + 7], [-1, -1]][: len(rows)]
    assert [each[0].tolist() for each in labels.values["validation"]] == expected
    if name == "swag":
        assert splits["train"].examples[0].texts == ("sent1", "sent2", "ending0", "ending1", "ending2", "ending3")
    else:
        assert splits["validation"].examples[0].id == "q0"


ENDINGS = [f"ending{number}" for number in range(3)]


def choices_of(folder: Path, rows: list[list[object]], **keys: Any) -> TaskConfig:
    """Write a task of choices in columns of a table; the same rows are measured."""
    for name in ("train", "dev"):
        write_tsv(folder / f"{name}.tsv", ("first", "second", *ENDINGS, "label"), rows)
    files = {"train": f"{folder}/train.tsv", "validation": {"dev": f"{folder}/dev.tsv"}}
    columns = {"text_columns": ["first", "second"], "choice_columns": ENDINGS}
    task = TaskConfig(**{"kind": "multiple-choice", **files, **columns} | keys)
    assert not list(task_problems(task))
    return task


ROWS: list[list[object]] = [["nabe ruto", "mosa", "aki", "kelo", "domi", 2], ["tinda", "lebi", "lamu", "beru", "", 0]]


def test_choices_become_one_document_with_a_sequence_each(tmp_path: Path, tokenizer: Path) -> None:
    """SWAG's shape, the second text before each ending; a question may have fewer choices."""
    prepared = prepare(choices_of(tmp_path, ROWS), tokenizer, 32, tmp_path / "run" / "task")
    found, shards = documents(prepared.folder / "train", tokenizer)
    assert decoded(tokenizer, found[0]) == (
        "nabe ruto[SEP]mosa aki[SEP][CLS]nabe ruto[SEP]mosa kelo[SEP][CLS]nabe ruto[SEP]mosa domi"
    )
    assert decoded(tokenizer, found[1]) == "tinda[SEP]lebi lamu[SEP][CLS]tinda[SEP]lebi beru"
    assert shards.labels is not None and [shards.labels[n].tolist() for n in (0, 1)] == [[[2]], [[0]]]
    assert prepared.labels == ("0", "1", "2")
    cut = prepare(choices_of(tmp_path, ROWS), tokenizer, 6, tmp_path / "short" / "task")
    assert cut.counts["train"].truncated == 2
    parts = decoded(tokenizer, documents(cut.folder / "train", tokenizer)[0][0]).split("[SEP][CLS]")
    assert len(parts) == 3 and all("[SEP]" in part for part in parts)


def test_a_list_of_choices_and_letters_are_read_as_races_are(tmp_path: Path, tokenizer: Path) -> None:
    """`options` is one column, `answer` a letter whose place is given by `labels`."""
    rows = [{"article": CONTEXT, "question": "aki?", "options": ["nabe", "ruto"], "answer": letter} for letter in "AB"]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {"train": f"{tmp_path}/train.jsonl", "validation": {"dev": f"{tmp_path}/dev.jsonl"}}
    keys |= {"text_columns": ["article", "question"], "choice_columns": ["options"], "label_column": "answer"}
    task = TaskConfig(kind="multiple-choice", labels=["A", "B", "C", "D"], **keys)
    prepared = prepare(task, tokenizer, 64, tmp_path / "run" / "task")
    _, shards = documents(prepared.folder / "dev", tokenizer)
    assert shards.labels is not None and np.concatenate([shards.labels[n] for n in (0, 1)]).tolist() == [[0], [1]]
    assert read_texts(prepared.folder / "dev")[1]["label"] == "B"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["nabe", "ruto", "aki", "kelo", "domi", 3], "line 4: label=3, and there are 3 choices: write 0 to 2"),
        (["nabe", "ruto", "aki", "kelo", "", 2], "line 4: label=2, and there are 2 choices"),
        (["nabe", "ruto", "aki", "kelo", "domi", "-1"], "line 4: label=-1, .*belongs under predict"),
        (["nabe", "ruto", "aki", "", "", 0], "line 4: 1 choices, or some that are not texts"),
        (["nabe", "ruto", "aki", "kelo", "domi", ""], "line 4: label is '', and not a class"),
    ],
)
def test_a_choice_that_is_none_is_refused_with_its_place(
    row: list[object], message: str, tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(choices_of(tmp_path, [*ROWS, row]), tokenizer, 32, tmp_path / "run" / "task")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "question-answering", "overlap_tokens": 256}, "below max_tokens=256"),
        ({"kind": "question-answering", "metrics": ["no_answer_exact"]}, "Set unanswerable=true"),
        ({"kind": "question-answering", "labels": ["a", "b"]}, "answers are no classes"),
        ({"kind": "question-answering", "text_columns": ["a"]}, "name the columns of the question and of its context"),
        ({"kind": "single-label", "overlap_tokens": 3}, "only for kind=question-answering"),
        ({"kind": "multiple-choice"}, "name a column with a list of choices"),
        ({"kind": "multiple-choice", "choice_columns": ["text"]}, "name a column with a list of choices"),
    ],
)
def test_keys_that_cannot_be_are_named_before_anything_is_read(keys: dict[str, Any], message: str) -> None:
    task = TaskConfig(train="train.jsonl", validation={"dev": "dev.jsonl"}, **keys)
    assert message in "\n".join(task_problems(task))


assert {*CONTEXT.split()} & {*PLAIN}
