"""The suites in yamls/suites run whole, by the verb, on small data in the layouts in which theirs are published.

Of each task's values one is tried, for few steps; of mteb's tasks, whose data only a network brings, one of a group.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from modernbert_train.__main__ import main
from modernbert_train.evaluate.suite.plan import read_suite
from tests.support.beir import words_about, write_lines
from tests.support.labelled import PLAIN, sentences
from tests.support.paths import ROOT

SUITES = ("encodeval", "mmbert", "quick")  # mmbert includes ettin, which includes modernbert, which includes glue
ONE, TWO = ("sentence",), ("sentence1", "sentence2")
GLUE = {"cola": ONE, "sst2": ONE, "mnli": ("premise", "hypothesis"), "qqp": ("question1", "question2")}
GLUE |= {"qnli": ("question", "sentence"), "mrpc": TWO, "stsb": TWO, "rte": TWO, "ax": ("premise", "hypothesis")}
SPLITS = ("train", "validation", "test")
OF_MNLI = ("train", *(f"{split}_{part}" for split in SPLITS[1:] for part in ("matched", "mismatched")))
CONLL = {"conll2003": "{word} NN B-NP {tag}", "ontonotes": "{word}\t{tag}", "uner": "{word}\t{tag}"}


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the data of all suites in the folder from which the command runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    draw = random.Random(1)
    for subset, columns in GLUE.items():
        for number, split in enumerate({"mnli": OF_MNLI, "ax": ("test",)}.get(subset, SPLITS)):
            rows: list[dict[str, Any]] = []
            for index, (text, label) in enumerate(sentences(24 if split == "train" else 12, number)):
                known = {"stsb": float(index % 6), "mnli": index % 3}.get(subset, int(label == "up"))
                hidden = split.startswith("test")
                texts = dict.fromkeys(columns, text)
                rows.append({**texts, "label": type(known)(-1) if hidden else known, "idx": index})
            write_parquet(Path("nyu-mll/glue", subset, f"{split}.parquet"), rows)
    for name in ("squad", "squad_v2"):
        for number, split in enumerate(SPLITS[:2]):
            rows = []
            for index, (text, _) in enumerate(sentences(12, number)):
                word = draw.choice(text.split())
                found = {"text": [word], "answer_start": [f" {text} ".index(f" {word} ")]}
                if name == "squad_v2" and index % 3 == 0:
                    found = {"text": [], "answer_start": []}
                rows.append({"id": f"q{index}", "title": "t", "context": text, "question": word, "answers": found})
            write_parquet(Path("rajpurkar", name, f"{split}.parquet"), rows)
    for name, form in CONLL.items():
        Path("data", name).mkdir(parents=True)
        for number, split in enumerate(SPLITS[:2]):
            blocks = ["-DOCSTART- -X- -X- O\n"] if name == "conll2003" else []
            for text, _ in sentences(12, number):
                tagged = [(word, "O" if word in PLAIN else "B-PER") for word in text.split()]
                blocks.append("".join(form.format(word=word, tag=tag) + "\n" for word, tag in tagged))
            Path("data", name, f"{split}.conll").write_text("\n".join(blocks))
    pairs = [(*words_about(seed, 4), words_about(seed + 1000, 4)[1]) for seed in range(40)]
    triplets = [dict(zip(("query", "positive", "negative"), pair, strict=True)) for pair in pairs]
    write_lines(Path("data/msmarco-triplets.jsonl"), triplets)
    write_lines(Path("data/msmarco-32000.jsonl"), triplets)
    names = {task.beir for name in ("modernbert", "encodeval") for task in read_suite(name)[0].tasks.values()}
    for name in {*filter(None, names), "msmarco"}:
        folder = Path("data/beir", name)
        (folder / "qrels").mkdir(parents=True)
        corpus = [{"_id": f"d{number}", "title": "", "text": text} for number, (_, text, _) in enumerate(pairs)]
        write_lines(folder / "corpus.jsonl", corpus)
        queries = [{"_id": f"q{number}", "text": query} for number, (query, _, _) in enumerate(pairs[:8])]
        write_lines(folder / "queries.jsonl", queries)
        judged = "".join(f"q{number}\td{number}\t1\n" for number in range(8))
        (folder / "qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return tmp_path


def shortened(name: str) -> dict[str, Any]:
    """Return a suite with all tasks, which takes minutes."""
    suite, home = read_suite(name)
    whole = asdict(suite) | {"seeds": [0]}
    groups = {group: members for group, members in suite.groups.items() if suite.tasks[members[0]].mteb}
    for group, members in groups.items():
        whole["groups"][group] = members[:1]
        for member in members[1:]:
            del whole["tasks"][member]
    for task in whole["tasks"].values():
        if task["finetune"]:
            task["keys"] |= {"steps": 2, "batch_texts": 8, "max_tokens": 64}
            if "overlap_tokens" in task["keys"] or task["finetune"].startswith("squad"):
                task["keys"] |= {"overlap_tokens": 8}
        elif task["retrieval"]:
            task["retrieval"] = str((home / task["retrieval"]).resolve())
            task["keys"] |= {"batch_size": 8, "max_tokens": 64, "device": "cpu"}
        task["choices"] = {"lr": [1e-3]} if task["choices"] else {}
        task["choose_seeds"] = None
    if suite.efficiency is not None:
        whole["efficiency"] = {"lengths": [16], "tokens": 512, "repeats": 1}
    return whole


def test_no_suite_is_left_out() -> None:
    known = [read_suite(name)[0].tasks for name in SUITES]
    for path in (ROOT / "yamls/suites").glob("*.yaml"):
        tasks = read_suite(path.stem)[0].tasks.items()
        assert all(any(each == whole.get(name) for whole in known) for name, each in tasks)


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUITES)
def test_a_suite_runs_whole_with_a_frozen_row(name: str, published: Path, models: dict[str, Path]) -> None:
    """Every cell has a figure or its reason, each chain of a frozen row stays frozen, all files are written."""
    whole, out, model = shortened(name), published / "out", models["modernbert"]
    Path("suite.yaml").write_text(json.dumps(whole))
    rows, tasks = (f"frozen:{model}", str(model)), whole["tasks"]
    offline = any(task["mteb"] for task in tasks.values())
    words = ["eval", *rows, "--suite", "suite.yaml", "--out", str(out), "--jobs", "2", "compute.device=cpu"]
    assert main(words) == (65 if offline else 0)
    table = json.loads((out / "table.json").read_text())
    for row in table["rows"][:2]:
        for task, cell in zip(tasks.values(), row["cells"], strict=False):
            trains = task["retrieval"] or tasks.get(task["after"], task)["retrieval"]
            unfit = row["model"].startswith("frozen") and trains is not None
            assert (cell["mean"] is None) == (unfit or task["mteb"] is not None) == bool(cell["failed"])
            if task["mteb"] and not unfit:
                assert "is not available" in cell["failed"][0]
            for each in cell["runs"] if task["finetune"] else ():
                source = json.loads((out / each["run"] / "result.json").read_text())["source"]
                assert source.startswith("frozen:") == row["model"].startswith("frozen")
    submitted = {file.stem for file in out.glob("submission/modernbert/*.tsv")}
    assert submitted == {file for task in tasks.values() for file in task["submit"]}
    assert all((out / f"table.{end}").stat().st_size for end in ("md", "csv", "tex", "json", "svg"))
    assert bool(table["efficiency"]) == (whole["efficiency"] is not None)
