"""Mistakes in a spec: all told at once, before any text is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.prepare import main
from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.prepare import PrepareConfig, prepare_problems

Command = Callable[..., int]
CONFIG = 78


def test_spec_with_typos(tmp_path: Path, capsys: Any) -> None:
    """All mistakes at once, each with its file and the nearest key, before any text is read."""
    spec = tmp_path / "spec.yaml"
    spec.write_text("out: x\nsources:\n  a: {kind: txt, pth: p}\ntokeniser: {vocab_size: 64}\nvalidation_share: much\n")
    assert main([str(spec)]) == CONFIG
    error = capsys.readouterr().err
    for words in ("sources.a.kind='txt'", "Did you mean text", "sources.a.path?", "Did you mean tokenizer?", "'much'"):
        assert words in error
    assert error.count(str(spec)) >= 4


def test_rules_that_span_keys(command: Command, capsys: Any) -> None:
    """A key that its source ignores would be a request not honoured."""
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
    """The first command a user copies."""
    root = Path(__file__).parents[2]
    config = load_typed(PrepareConfig, [str(root / "yamls" / "data" / f"{name}.yaml")], [])
    assert prepare_problems(config) == []
