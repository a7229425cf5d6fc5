"""Mistakes in a spec: all reported together, before any text is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.prepare import main
from modernbert_train.__main__ import main as run
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.prepare import PrepareConfig, prepare_problems

Command = Callable[..., int]
CONFIG = 78


def test_spec_with_typos(tmp_path: Path, capsys: Any) -> None:
    """All mistakes together, each with its file and the nearest key, before any text is read."""
    spec = tmp_path / "spec.yaml"
    spec.write_text("out: x\nsources:\n  a: {kind: txt, pth: p}\ntokeniser: {vocab_size: 64}\nvalidation_share: much\n")
    assert main([str(spec)]) == CONFIG
    error = capsys.readouterr().err
    for words in ("sources.a.kind='txt'", "Did you mean text", "sources.a.path?", "Did you mean tokenizer?", "'much'"):
        assert words in error
    assert error.count(str(spec)) >= 4


def test_a_file_of_another_verb_is_named_as_what_it_is(tmp_path: Path, capsys: Any) -> None:
    """Six lines of unknown keys would hide that the file is valid for another verb."""
    root, texts = Path(__file__).parents[2] / "yamls", tmp_path / "texts"
    texts.mkdir()
    assert main([str(root / "quickstart.yaml")]) == CONFIG
    error = capsys.readouterr().err
    assert "quickstart.yaml: is the file of a run, which `train`, `check` and `plan` read" in error
    assert error.count("\n") == 1
    assert run(["check", str(root / "data/quickstart.yaml")]) == CONFIG
    assert "quickstart.yaml: is a spec of data, which `prepare` reads" in capsys.readouterr().err
    assert main([str(texts)]) == CONFIG
    assert f"{texts}: is a folder, and the YAML file of a spec is expected" in capsys.readouterr().err


@pytest.mark.runs
def test_a_share_of_the_documents_is_the_same_in_any_number_of_tasks(
    command: Command, tmp_path: Path, capsys: Any
) -> None:
    """A short run used to tokenise sixteen times its text; the selection must not depend on a race."""
    reports = []
    for name, task in (("one", 1 << 27), ("many", 2_000)):
        assert command("document_share=0.5", f"out={tmp_path}/{name}", f"task_bytes={task}") == 0
        reports.append(json.loads((tmp_path / name / "prepare_report.json").read_text()))
    assert reports[0]["sources"] == reports[1]["sources"] and reports[0]["tasks"] < reports[1]["tasks"]
    assert 15 < reports[0]["dropped"]["outside_document_share"] < 45
    assert command("document_share=0.5", f"out={tmp_path}/one", f"task_bytes={1 << 27}") == 0
    assert "already complete" in capsys.readouterr().out
    assert command("document_share=0", f"out={tmp_path}/none") == CONFIG


def test_rules_that_span_keys(command: Command, capsys: Any) -> None:
    """A key that its source ignores would be silently dropped."""
    words = ["sources.mine.split=train", "sources.lib.kind=python_stdlib", "sources.lib.path=x", "sources.b.kind=csv"]
    words += ["tokenizer.vocab_size=1000", "validation_share=1", "min_characters=0", "shard_bytes=10"]
    assert command(*words, "tokenizer.training_share=0") == CONFIG
    error = capsys.readouterr().err
    for expected in (
        "sources.mine.split=train: a source of kind text does not read it",
        "sources.lib.path=x: a source of kind python_stdlib does not read it",
        "sources.b.path: missing",
        "tokenizer.vocab_size=1000: must be a multiple of 64 and at least 320. The nearest is 1024",
        "tokenizer.training_share=0.0",
        "validation_share=1.0",
        "min_characters=0",
        "shard_bytes=10",
    ):
        assert expected in error
    assert main(["out=x"]) == CONFIG and "sources: empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart", "own_text"])
def test_shipped_specs_are_valid(name: str) -> None:
    """They are the first commands that a user copies."""
    root = Path(__file__).parents[2]
    config = load_typed(PrepareConfig, [str(root / "yamls" / "data" / f"{name}.yaml")], [])
    assert prepare_problems(config) == []
