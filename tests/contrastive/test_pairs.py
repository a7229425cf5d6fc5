"""Files of pairs become shards: their contents, counted omissions, and refusals before training."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from data_prep.pairs import text_hash
from data_prep.prepare import main as prepare
from modernbert_train.__main__ import main
from modernbert_train.config.contrastive import SCORE_UNIT
from modernbert_train.data.dataset_card import CARD, file_sha256, read_card
from modernbert_train.vocabulary import read_vocabulary
from tests.support.killed_tasks import run_and_kill, start
from tests.support.pairs import ContrastiveRun, as_source, documents, prepare_pairs, write_rows
from tests.support.runs import metrics

RANGE = [-1, 1]


@pytest.mark.runs
@pytest.mark.parametrize("end", ["jsonl", "parquet", "hub"])
def test_a_row_becomes_one_document_with_hashes_of_its_texts(pairs: Path, tmp_path: Path, end: str) -> None:
    """With prefixes and cut queries; useless pairs are dropped, by reason."""
    twice = {"query": "one two three four five six", "positive": "ett", "negative": ["tva", "tre", ""]}
    rows: list[dict[str, Any]] = [
        twice,
        twice,
        {"query": "uno", "positive": " ", "negative": []},
        {"query": "same", "positive": "same", "negative": []},
        {"query": "due", "positive": "deux", "negative": ["deux", "due", "zwei"]},
        {"query": " ", "positive": "tom", "negative": []},
        {"query": "tio", "positive": "deux", "negative": ["due"]},
    ]
    if end == "jsonl":
        file = write_rows(tmp_path / "rows.jsonl", rows)
    else:
        file = tmp_path / "rows/rows.parquet"  # whose folder is a dataset to the library that reads the hub's
        file.parent.mkdir()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    out, tokenizer_folder, source = tmp_path / "out", pairs / "tokenizer", as_source(file)
    if end == "hub":
        source = {"kind": "hub", "path": str(file.parent)}
        assert prepare_pairs(out, source, tokenizer_folder, negatives=["other"]) == 65
    texts = {"negatives": ["negative"], "max_negatives": 2, "query_max_tokens": 6}
    texts |= {"query_prefix": "q: ", "document_prefix": "d: "}
    assert prepare_pairs(out, source, tokenizer_folder, "validation_share=0", **texts) == 0
    counts = json.loads((tmp_path / "out/pairs_report.json").read_text())["counts"]
    assert {key: n for key, n in counts.items() if n} == {
        "train": 3, "negatives": 4, "truncated": 3, "empty": 2, "same": 1, "duplicates": 1, "contradictions": 2,
        "repeated": 2,
    }  # fmt: skip
    folder = tmp_path / "out/train"
    assert read_card(folder).sides == 4 and not (tmp_path / "out/validation").exists()
    labels = np.load(folder / "labels.npy")
    hashes = labels[:, ::2]
    assert not labels[:, 1::2].any(), "nobody gave scores"
    first = [text_hash(text) for text in ("one two three four five six", "ett", "tva", "tre")]
    assert hashes.tolist() == [first, [text_hash("due"), text_hash("deux"), text_hash("zwei"), 0],
                               [text_hash("tio"), text_hash("deux"), text_hash("due"), 0]]  # fmt: skip
    from tokenizers import Tokenizer

    tokenizer, vocabulary = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json"), read_vocabulary(tokenizer_folder)
    texts_of_first = ("q: one two three four five six", "d: ett", "d: tva", "d: tre")
    query, *others = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts_of_first)
    between = [vocabulary.sep_id, vocabulary.cls_id]
    assert documents(folder)[0] == [*query[:4], *(id for ids in others for id in (*between, *ids))]


@pytest.mark.runs
def test_scores_are_shares_of_their_range_and_follow_their_texts(pairs: Path, tmp_path: Path) -> None:
    """An empty negative, one that is there twice and one that is the positive are left out with their scores."""
    rows = [
        {"query": "uno", "positive": "ett", "s": 2, "n": ["tva", "", "ett", "tre", "tva"], "m": [-2, 9, 9, 4, 8]},
        {"query": "due", "positive": "deux", "s": 10, "n": [], "m": []},
    ]
    texts = {"negatives": ["n"], "max_negatives": 3, "scores": ["s", "m"], "score_range": [-10, 10]}
    source = as_source(write_rows(tmp_path / "rows.jsonl", rows))
    assert prepare_pairs(tmp_path / "out", source, pairs / "tokenizer", "validation_share=0", **texts) == 0
    labels = np.load(tmp_path / "out/train/labels.npy")
    assert labels[0, ::2].tolist() == [text_hash(text) for text in ("uno", "ett", "tva", "tre")] + [0]
    assert (labels[:, 1::2] / SCORE_UNIT).round(5).tolist() == [[0, 0.6, 0.4, 0.7, 0], [0, 1.0, 0, 0, 0]]
    assert read_card(tmp_path / "out/train").scored


@pytest.mark.parametrize(
    ("rows", "texts", "message"),
    [
        ([{"query": "a"}], {}, "rows.jsonl:1: no field 'positive' among 'query'"),
        ([{"query": "a", "positive": 3}], {}, "positive is 3, and not a text"),
        ([{"query": "a", "positive": ""}], {}, "none of its 1 documents is left (empty 1"),
        ([{"query": "a", "positive": "b", "negative": 3}], {"negatives": ["negative"]}, "neither a text nor a list"),
        ([{"query": "a", "positive": "b"}], {"positive": "query"}, "Name each column once"),
        ([{"query": "a", "positive": "b"}], {"max_tokens": 2}, "pairs.max_tokens=2"),
        ([{"query": "a", "positive": "b"}], {"most_tokens": 2}, "unknown key. Did you mean pairs.max_tokens?"),
        ([{"query": "a", "positive": "b", "s": 1.5}], {"scores": ["s"], "score_range": RANGE}, "1.5 lies outside"),
        ([{"query": "a", "positive": "b", "s": "x"}], {"scores": ["s"], "score_range": RANGE}, "['x'] is no score"),
        ([{"query": "a", "positive": "b", "s": None}], {"scores": ["s"], "score_range": RANGE}, "1 text, and 0 scores"),
        ([{"query": "a", "positive": "b", "s": 1}], {"scores": ["s"]}, "pairs.score_range need each other"),
        (
            [{"query": "a", "positive": "b", "s": 1}],
            {"scores": ["s", "s"], "score_range": RANGE},
            "name 1, for pairs.positive",
        ),
    ],
)
def test_bad_rows_are_named(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], texts: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    source = as_source(write_rows(tmp_path / "rows.jsonl", rows))
    assert prepare_pairs(tmp_path / "out", source, pairs / "tokenizer", **texts) in (65, 78)
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.runs
def test_a_finished_dataset_is_kept_and_another_spec_is_not_taken_for_it(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `prepare` does with text: repeating the command is free, and nothing is replaced without --overwrite."""
    rows = [{"query": "uno", "positive": "ett"}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    asked = (tmp_path / "out", as_source(file), pairs / "tokenizer", "validation_share=0")
    assert prepare_pairs(*asked) == 0
    assert "1 examples to train, 0 held out" in capsys.readouterr().out
    assert prepare_pairs(*asked) == 0 and "already complete" in capsys.readouterr().out
    assert prepare_pairs(*asked, max_tokens=8) == 78
    assert "pairs.max_tokens: 256 -> 8" in capsys.readouterr().err
    write_rows(file, [*rows, {"query": "due", "positive": "deux"}])
    assert prepare_pairs(*asked) == 78 and "of other files" in capsys.readouterr().err
    assert prepare_pairs(*asked, "--overwrite") == 0 and "2 examples to train" in capsys.readouterr().out
    assert prepare_pairs(tmp_path / "other", {"kind": "csv", "path": str(file)}, pairs / "tokenizer") == 78
    assert "does not end in .csv" in capsys.readouterr().err


LIMIT = r"eval\.max_tokens=10: the first document of data\.validation has \d+ tokens.* Set at least \d+"


@pytest.mark.runs
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.train={text}"], "its documents are no pairs of texts"),
        (["objective.score_weight=1"], r"lacks the scores that objective\.score_weight weighs"),
        (["objective.score_weight=1", "objective.pooling=late"], "compared with cosines of one vector a text"),
        (["objective.matryoshka=[32]"], "32 is not below 32"),
        (
            ["objective={name: contrastive, pooling: late, matryoshka: [128]}"],
            r"matryoshka=\[128\] with objective\.token_",
        ),
        (["objective={name: contrastive, pooling: sparse, matryoshka: [16]}"], r"objective\.matryoshka="),
        (["objective={name: contrastive, pooling: sparse, margin: 0.1}"], r"objective\.margin="),
        (["objective={name: tlm, masking: reference}"], "objective.name=tlm with objective.masking=reference"),
        (["objective={name: tlm, predict_from: before}"], "objective.predict_from=before with objective.name=tlm"),
        (["phases.main.row_tokens=32", "phases.main.microbatch_tokens=64"], "has examples of up to 36 tokens"),
        (["phases.main={row_tokens: 48, batch_rows: 1, microbatch_tokens: 48}"], "holds about one example"),
        (["phases.main.objective={name: mlm}"], r"Set objective\.mlm_head=true"),
        (["eval.max_tokens=10"], LIMIT),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(
    contrastive_run: ContrastiveRun, text: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    words = contrastive_run(*(each.replace("{text}", str(text)) for each in overrides))
    for verb in ("check", "train"):
        assert main([verb, *words]) in (65, 78)
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.runs
def test_shards_that_an_earlier_version_wrote_train_as_before(
    pairs: Path, contrastive_run: ContrastiveRun, tmp_path: Path
) -> None:
    """Their labels are hashes alone, and their card says nothing of scores and of single texts."""
    before = shutil.copytree(pairs / "shards", tmp_path / "before")
    for split in ("train", "validation"):
        np.save(before / split / "labels.npy", np.ascontiguousarray(np.load(before / split / "labels.npy")[:, ::2]))
        card = json.loads((before / split / CARD).read_text())
        del card["scored"], card["text_lengths"]
        card["labels_sha256"] = file_sha256(before / split / "labels.npy")
        (before / split / CARD).write_text(json.dumps(card))
    short = ("phases.main.tokens=6000", f"data.tokenizer={before}/tokenizer")
    assert main(["train", *contrastive_run("name=now", *short)]) == 0
    old = (f"data.train={before}/train", f"data.validation={before}/validation")
    assert main(["train", *contrastive_run("name=before", *short, *old)]) == 0
    one, other = (metrics(tmp_path / "runs" / name, "step") for name in ("now", "before"))
    assert [step["loss"] for step in one] == [step["loss"] for step in other] and len(one) > 2


# --- many tasks, many processes, kills: the same shards, those of the versions that had one process ------------------

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [chr(97 + i) + chr(97 + j) for i in range(26) for j in range(26)]
PAIRS = {
    "negatives": ["neg"], "scores": ["s", "sn"], "score_range": [-1, 1], "max_negatives": 2, "query_prefix": "aa ",
    "document_prefix": "bb ", "max_tokens": 24, "query_max_tokens": 8,
}  # fmt: skip
# `digest` of the dataset that `prepare` wrote from these files before it had tasks
BEFORE = "9fc195c07e633ebe293fa77171627df63f3bec0801516883548e982d973e6f28"


def rows_with_all_reasons(number: int) -> list[dict[str, Any]]:
    """Rows with every reason to leave something out."""
    draw, rows = random.Random(3), []

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    for i in range(number):
        query, positive = text(9), text(30)
        row = {"query": query, "positive": positive, "neg": [text(20) for _ in range(draw.randint(0, 3))]}
        row |= {"other": text(12), "s": draw.random()}
        row["sn"] = [round(draw.random(), 3) for _ in row["neg"]]
        row["so"] = draw.random()
        rows.append(row)
        if i % 7 == 0:
            rows.append(dict(row))
        if i % 11 == 0:
            row["neg"].append(positive)
            row["sn"].append(0.5)
        if i % 13 == 0:
            rows.append({**row, "positive": query})
        if i % 17 == 0:
            rows.append({**row, "query": " "})
    return rows


def write_sources(folder: Path, number: int) -> dict[str, dict[str, str]]:
    """The same rows as files of each kind."""
    rows = rows_with_all_reasons(number)
    names = {"query": "query", "positive": "positive", "neg": "other", "sn": "so", "s": "s"}
    flat = [{key: row[name] for key, name in names.items()} for row in rows]
    write_rows(folder / "a.jsonl", rows)
    with (folder / "b.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(flat[0]))
        writer.writeheader()
        for i, row in enumerate(flat):
            writer.writerow({**row, "neg": row["neg"] + (', "quoted"\nline' if i % 5 == 0 else "")})
    lines = ["\t".join(flat[0]), *("\t".join(map(str, {**r, "positive": '"' + r["positive"]}.values())) for r in flat)]
    (folder / "c.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = pyarrow.Table.from_pylist([{k: r[k] for k in ("query", "positive", "neg", "s", "sn")} for r in rows])
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=max(20, number // 3))
    files = {"jsonl": "a.jsonl", "csv": "b.csv", "tsv": "c.tsv", "parquet": "d.parquet"}
    return {kind: {"kind": kind, "path": str(folder / file)} for kind, file in files.items()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """spec.yaml, its sources and its tokenizer, which has a token for each word."""
    home = tmp_path_factory.mktemp("pairs_of_tasks")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
        "added_tokens": [{"id": id, "content": token, **flags} for id, token in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "model": {
            "type": "WordLevel", "unk_token": "[UNK]",
            "vocab": {token: id for id, token in enumerate([*SPECIAL, *WORDS])},
        },
    }  # fmt: skip
    (home / "tokenizer").mkdir()
    (home / "tokenizer/tokenizer.json").write_text(json.dumps(content))
    spec = {"out": str(home / "one"), "sources": write_sources(home, 60), "pairs": PAIRS, "validation_share": 0.2}
    (home / "spec.yaml").write_text(yaml.safe_dump({**spec, "tokenizer": {"path": str(home / "tokenizer")}}))
    return home


@pytest.fixture(scope="module")
def one(home: Path) -> Path:
    """The dataset of a single process and task."""
    assert prepare([f"{home}/spec.yaml"]) == 0
    return home / "one"


def digest(out: Path) -> str:
    """Hash everything that training reads in both folders, and the counts; not versions and compressed bytes."""
    found = hashlib.sha256()
    for split in ("train", "validation"):
        folder, card = out / split, read_card(out / split)
        found.update(json.dumps(documents(folder)).encode())
        for name in ("labels", "lengths", "token_counts"):
            array = np.load(folder / f"{name}.npy")
            found.update(f"{array.dtype.str} {array.shape}".encode() + array.tobytes())
        about = (card.sides, card.longest, card.text_lengths, card.scored, card.prompts, card.vocab_size, card.dtype)
        found.update(json.dumps(about).encode())
    counts = json.loads((out / "pairs_report.json").read_text())["counts"]
    found.update(json.dumps({key: number for key, number in counts.items() if number}).encode())
    return found.hexdigest()


def files_of(out: Path) -> dict[str, bytes]:
    """All files by name; the report without places, which are lines of a file that is not cut."""
    files = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    report = json.loads(files["pairs_report.json"])
    assert sorted(report.pop("first_dropped")) == ["empty", "same"]
    return files | {"pairs_report.json": json.dumps(report).encode()}


@pytest.mark.runs
def test_specs_of_before_give_the_same_dataset(one: Path) -> None:
    """For every kind of file; else a resumed run gets other batches."""
    assert digest(one) == BEFORE


@pytest.mark.runs
def test_neither_tasks_nor_processes_nor_machines_change_a_byte(home: Path, one: Path) -> None:
    for name, words in {"tasks": [], "processes": ["executor.workers=2"]}.items():
        assert prepare([f"{home}/spec.yaml", f"out={home / name}", "task_bytes=2000", *words]) == 0
        assert files_of(home / name) == files_of(one)
    line = [f"{home}/spec.yaml", f"out={home / 'machines'}", "task_bytes=2000", "--part"]
    children = [start([*line, part]) for part in ("2/2", "1/2")]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert files_of(home / "machines") == files_of(one)


@pytest.mark.runs
def test_killed_anywhere_and_started_again_gives_the_same_bytes(home: Path, one: Path) -> None:
    """A preemption must cost minutes at every stage."""
    words = [f"{home}/spec.yaml", f"out={home / 'killed'}", "task_bytes=2000"]
    started = time.monotonic()
    assert prepare([*words, f"out={home / 'whole'}"]) == 0
    whole, draw = time.monotonic() - started, random.Random(3)
    completed = set()
    for _ in range(40):
        done = run_and_kill(words, draw.uniform(0.05, 0.6) * whole)
        completed.add(sum(1 for _ in (home / "killed.work").rglob("completions/*")))
        if done or (home / "killed").exists():
            break
    assert len(completed) > 1
    assert prepare(words) == 0
    assert files_of(home / "killed") == files_of(one) and not list(home.glob("killed.*"))


@pytest.mark.runs
def test_prefixes_are_columns(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row has its instructions, as in the training sets of E5 and BGE; another one makes another example."""
    rows = [
        {"query": "aa", "positive": "bb", "neg": "cc", "ask": "dd ", "tell": "ee "},
        {"query": "aa", "positive": "bb", "neg": "cc", "ask": "ff ", "tell": None},
    ]
    texts = {"negatives": ["neg"], "query_prefix_column": "ask", "document_prefix_column": "tell"}
    asked = (tmp_path / "out", as_source(write_rows(tmp_path / "a.jsonl", rows)), home / "tokenizer")
    assert prepare_pairs(*asked, "validation_share=0", query_prefix="x", **texts) == 78
    assert "pairs.query_prefix and pairs.query_prefix_column" in capsys.readouterr().err
    assert prepare_pairs(*asked, "validation_share=0", **texts) == 0
    ids = {token: id for id, token in enumerate([*SPECIAL, *WORDS])}
    between = [ids["[SEP]"], ids["[CLS]"]]
    one, other = ([[ids[token] for token in text.split()] for text in texts] for texts in
                  (("dd aa", "ee bb", "ee cc"), ("ff aa", "bb", "cc")))  # fmt: skip
    expected = [[*q, *between, *p, *between, *n] for q, p, n in (one, other)]
    assert documents(tmp_path / "out/train") == expected
    hashes = np.load(tmp_path / "out/train/labels.npy")[:, ::2].tolist()
    assert hashes == [[text_hash("aa"), text_hash("bb"), text_hash("cc")]] * 2, "of the texts alone"
    assert read_card(tmp_path / "out/train").prompts is None


@pytest.mark.runs
def test_damaged_rows_are_counted_if_the_spec_says_so(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A web-scale file has some; by default the first ends the command."""
    rows = [{"query": f"aa {word}", "positive": f"bb {word}"} for word in WORDS[:40]]
    file = write_rows(tmp_path / "a.jsonl", rows)
    file.write_text(file.read_text() + '{"query": "aa", "positive": "\\ud800"}\n{"query": "a", "query": "b"}\n')
    asked = (tmp_path / "out", as_source(file), home / "tokenizer", "validation_share=0")
    assert prepare_pairs(*asked) == 65
    assert "a.jsonl:41: half of a surrogate pair" in capsys.readouterr().err
    assert prepare_pairs(*asked, "on_error=skip") == 65
    assert "2 of 42 documents cannot be used, more than max_left_out=0.01" in capsys.readouterr().err
    assert prepare_pairs(*asked, "on_error=skip", "max_left_out=0.1") == 0
    assert "2 damaged" in capsys.readouterr().out
    dropped = json.loads((tmp_path / "out/pairs_report.json").read_text())["first_dropped"]
    assert "duplicate key query" in dropped["not_json"][0] and dropped["not_utf8"]
