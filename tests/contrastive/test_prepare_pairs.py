"""Many tasks, many processes, kills: pairs become the same shards, those of the versions that had one process."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from data_prep.pairs import text_hash
from data_prep.prepare import main
from modernbert_train.data.dataset_card import read_card
from tests.support.killed_tasks import run_and_kill, start
from tests.support.pairs import as_source, documents, prepare_pairs, write_rows

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [chr(97 + i) + chr(97 + j) for i in range(26) for j in range(26)]
PAIRS = {
    "negatives": ["neg"], "scores": ["s", "sn"], "score_range": [-1, 1], "max_negatives": 2, "query_prefix": "aa ",
    "document_prefix": "bb ", "max_tokens": 24, "query_max_tokens": 8,
}  # fmt: skip
# `digest` of the dataset that `prepare` wrote from these files before it had tasks
BEFORE = "9fc195c07e633ebe293fa77171627df63f3bec0801516883548e982d973e6f28"


def make_rows(number: int) -> list[dict[str, Any]]:
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
    rows = make_rows(number)
    flat = [
        {"query": row["query"], "positive": row["positive"], "neg": row["other"], "sn": row["so"], "s": row["s"]}
        for row in rows
    ]
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
    assert main([f"{home}/spec.yaml"]) == 0
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
        assert main([f"{home}/spec.yaml", f"out={home / name}", "task_bytes=2000", *words]) == 0
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
    assert main([*words, f"out={home / 'whole'}"]) == 0
    whole, draw = time.monotonic() - started, random.Random(3)
    completed = set()
    for _ in range(40):
        done = run_and_kill(words, draw.uniform(0.05, 0.6) * whole)
        completed.add(sum(1 for _ in (home / "killed.work").rglob("completions/*")))
        if done or (home / "killed").exists():
            break
    assert len(completed) > 1
    assert main(words) == 0
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
