"""Verbs as a user types them, in an empty folder, each in a separate process.

If this breaks, a script for an earlier version ends without naming the new command, or a verb with two uses confuses
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.make_shards import make_texts, make_tokenizer
from tests.support.paths import ROOT

Program = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = pytest.mark.runs


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return a function that runs the installed command in tmp_path."""
    start = "import sys; sys.argv[0] = 'modernbert-train'; from modernbert_train.__main__ import program; program()"

    def run(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", start, *map(str, words)],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def same(program: Program, old: list[object], new: list[object], code: int = 0) -> str:
    """Return the output of both commands, which must be equal; the old one also prints a notice on stderr."""
    first, second = program(*old, code=code), program(*new, code=code)
    answer, _, rest = first.stderr.partition("\n")
    assert answer.startswith(f"{old[0]}: now `{new[0]} ") and answer.endswith("; continuing")
    assert first.stdout == second.stdout and rest == second.stderr
    return second.stdout or second.stderr


def test_old_verbs_answer_with_the_new_one_and_continue(program: Program, tiny_data: Path, tmp_path: Path) -> None:
    suite = ["--suite", "quick", "--out", "judged"]
    assert "quick: " in same(
        program, ["evaluate", "you/m", *suite, "--dry-run"], ["eval", "you/m", *suite, "--dry-run"]
    )
    assert "no such" in same(program, ["import-config", "absent.yaml"], ["init", "from", "absent.yaml"], 78)
    assert "documents" in same(program, ["stats", tiny_data / "train"], ["inspect", tiny_data / "train"])
    (tmp_path / "runs").mkdir()
    assert "no runs" in same(program, ["runs"], ["report", "--list"])
    preset = ["pretrain", "--preset", "quickstart"]
    wrong = same(program, ["quickstart", "--tiny", "optim.lrr=1"], [*preset, "--tiny", "optim.lrr=1"], 78)
    assert "optim.lrr (command line): unknown key" in wrong
    assert "Leave out my/texts --gpus." in same(
        program, ["quickstart", "my/texts", "--gpus", 2], [*preset, "my/texts", "--gpus", 2], 64
    )


def test_an_old_verb_with_other_words_is_refused_with_the_new_command(program: Program) -> None:
    words = ["prepare-pairs", "data/pairs", "pairs.jsonl", "--tokenizer", "data/quickstart/tokenizer"]
    assert "`prepare SPEC.yaml` takes its options as keys; `init data pairs`" in program(*words, code=64).stderr
    assert "`tokenizer fertility TOKENIZER TEXT...`" in program("stats", "t", "--tokenizer", "x", code=64).stderr


def test_a_spec_of_pairs_is_prepared_as_pairs(program: Program, tmp_path: Path) -> None:
    """With `init`'s example and other paths; a mistake in it is answered with the keys of pairs."""
    make_tokenizer(tmp_path / "tokenizer", make_texts(40))
    rows = [{"query": text[:40], "positive": text[40:90]} for text in make_texts(40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs.yaml").write_text(program("init", "data", "pairs").stdout)
    words = ["prepare", "pairs.yaml", "sources.mine.path=mine.jsonl", "tokenizer.path=tokenizer"]
    assert "pairs.max_tokens?" in program(*words, "pairs.max_token=9", code=78).stderr
    assert "filters" in program(*words, "filters.english={}", code=78).stderr
    made = program(*words, "validation_share=0.2", "pairs.max_tokens=9").stdout
    assert made.startswith("data/pairs: ") and "truncated" in made and "row_tokens must be at least" in made
    assert {path.name for path in (tmp_path / "data/pairs").iterdir()} == {
        "train", "validation", "tokenizer", "pairs_report.json",
    }  # fmt: skip
    assert program("inspect", "data/pairs/train").stdout.startswith("data/pairs/train\n  train: ")


def test_eval_is_of_a_run_or_of_a_suite(program: Program) -> None:
    assert "--jobs needs --suite. Add it" in program("eval", "runs/x", "--jobs", 2, code=64).stderr
    assert "Add --out" in program("eval", "m", "--suite", "quick", code=64).stderr
    assert "runs/x: no such run" in program("eval", "runs/x", code=78).stderr
    for words in (["frozen:runs/x"], ["runs/x", "untrained:frozen:runs/x"]):
        said = program("eval", *words, code=78).stderr
        assert f"eval {words[-1]}: frozen: and untrained: name baselines of a suite's tasks. Add --suite" in said
    assert "names no model" in program("eval", "lr=1e-5", "--suite", "quick", "--out", "t", code=78).stderr
    said = program("eval", "you/a", "you/b", "--suite", "quick", "--out", "t", "--dry-run").stdout
    answer, data, *_ = said.splitlines()
    assert "2 models" in answer and "missing" in data


def test_a_folder_in_the_place_of_a_file_of_texts_is_named(program: Program, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    said = program("embed", "runs/x", "texts", "--out", "out.npy", code=78).stderr
    assert "texts: a folder. Give one file of texts" in said


def test_init_from_takes_one_file(program: Program) -> None:
    assert "add the file to convert" in program("init", "from", code=78).stderr
    assert "a third name" in program("init", "from", "their.yaml", "more", code=78).stderr


def test_a_list_is_printed_and_a_page_is_drawn(program: Program, tmp_path: Path) -> None:
    assert "report runs: no such folder" in program("report", code=78).stderr
    (tmp_path / "runs").mkdir()
    assert "report runs: no runs there." in program("report").stdout
    for words in (["runs"], ["--list", "runs"]):
        assert "report runs: no runs there. A run is a folder with" in program("report", *words, code=78).stderr
    assert json.loads(program("report", "runs", "--json").stdout) == []
    assert json.loads(program("report", "runs", "--json").stdout) == []
    assert "a list is printed" in program("report", "runs", "--out", "page.html", code=78).stderr
