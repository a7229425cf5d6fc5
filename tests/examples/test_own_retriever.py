"""A retriever of one's own, from documents to a table, by the script as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT


def write_lines(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(folder: Path, hours: str, miner: str = "out/pretrained/runs/encoder") -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT), "PAIRS": "epochs=0.2 max_tokens=64"}
    environment["MINER"] = miner
    script = [str(ROOT / "examples/own_retriever.sh"), "out", hours, "suite.yaml", "documents.jsonl"]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_documents_become_a_table_and_a_second_command_repeats_nothing(tmp_path: Path) -> None:
    pages, modules = sorted((ROOT / "docs").rglob("*.md")), sorted((ROOT / "modernbert_train").rglob("*.py"))
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in (*pages, *modules)}
    write_lines(tmp_path / "documents.jsonl", [{"text": text, "path": str(path)} for path, text in texts.items()])
    (tmp_path / "search/qrels").mkdir(parents=True)
    first = [texts[path.relative_to(ROOT)] for path in pages]
    write_lines(tmp_path / "search/corpus.jsonl", [{"_id": f"d{n}", "text": text} for n, text in enumerate(first)])
    titles = [{"_id": f"q{n}", "text": text.splitlines()[0]} for n, text in enumerate(first)]
    write_lines(tmp_path / "search/queries.jsonl", titles)
    right = "".join(f"q{n}\td{n}\t1\n" for n in range(len(first)))
    (tmp_path / "search/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n" + right)
    (tmp_path / "suite.yaml").write_text("tasks:\n  search: {beir: search}\n")
    hours = "0.05"
    done = run(tmp_path, hours)
    while needed := re.search(r"Give at least --hours ([\d.]*\d)", done.stderr):  # a busy machine is slower
        assert float(hours) < float(needed[1]) < 1
        hours = needed[1]
        done = run(tmp_path, hours)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "out/table/table.json").read_text()
    rows = {row["source"]: row["cells"][0]["mean"] for row in json.loads(table)["rows"]}
    assert list(rows) == [*(f"out/runs/own-{seed}/st" for seed in (17, 18, 19)), "out/runs/twin-17/st", "bm25"]
    assert all(0 < score <= 1 for score in rows.values())
    assert len({*rows.values()}) > 3, "seeds differ, and the twin is another model"
    lines = (tmp_path / "out/mined.jsonl").read_text().splitlines()
    assert any(json.loads(line)["negatives"] for line in lines)  # such an encoder finds some for every thirtieth pair
    spec = yaml.safe_load((tmp_path / "out/runs/twin-17/pairs/prepare.yaml").read_text())
    assert spec["pairs"]["negatives"] == ["negatives"]
    made = [tmp_path / "out" / name for name in ("pairs.jsonl", "mined.jsonl")]
    times = [file.stat().st_mtime_ns for file in made]
    steps = [(tmp_path / f"out/runs/{name}/metrics.jsonl").read_text() for name in ("own-17", "twin-17")]
    again = run(tmp_path, hours)
    assert again.returncode == 0 and "already trained to its end" in again.stdout, again.stdout + again.stderr
    assert times == [file.stat().st_mtime_ns for file in made]
    assert steps == [(tmp_path / f"out/runs/{name}/metrics.jsonl").read_text() for name in ("own-17", "twin-17")]
    assert table == (tmp_path / "out/table/table.json").read_text()
    without = run(tmp_path, hours, miner="")
    assert without.returncode == 78 and "negatives" in without.stderr, "without negatives it is another training"
    assert steps[0] == (tmp_path / "out/runs/own-17/metrics.jsonl").read_text()


@pytest.mark.runs
def test_a_mistake_in_the_suite_is_found_before_the_hours(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("tasks:\n  intents: {finetune: {kind: single-label}}\n")
    write_lines(tmp_path / "documents.jsonl", [{"text": "Some text.", "path": "a.md"}])
    done = run(tmp_path, "1")
    assert done.returncode == 78 and "tasks.intents.finetune" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "out").exists()
