"""Provenance of a run. If this breaks, a model's program, data, machines and cost cannot be found out later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.checkpoints import provenance
from modernbert_train.checkpoints.provenance import STARTS, command_line, in_words, read_starts
from modernbert_train.core import installed
from modernbert_train.core.redact import HIDDEN


def start(time: float, **more: Any) -> dict[str, Any]:
    about = {"version": "0.1.0", "commit": "abc1234def", "changes": True, "libraries": {"torch": "2.13.0"}}
    machine = {"device": "H100", "ranks": 2, "host": "node7", "tokens": 100, "command": ["train", "run.yaml"]}
    return {"kind": "start", "time": time, **about, **machine, **more}


def end(time: float, outcome: str = "finished", **more: Any) -> dict[str, Any]:
    return {"kind": "end", "time": time, "outcome": outcome, **more}


def write(folder: Path, *entries: dict[str, Any], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STARTS).write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail, encoding="utf-8")
    return folder


def test_starts_and_their_ends_belong_together(tmp_path: Path) -> None:
    """A killed start lacks an end, and must not take the next start's."""
    folder = write(tmp_path, start(10), start(20), end(30, "stopped"), start(40), tail='{"kind": "en')
    first, second, third = read_starts(folder)
    assert (first.ended, first.outcome) == (None, "")
    assert (second.ended, second.outcome) == (30, "stopped")
    assert third.ended is None and third.libraries == {"torch": "2.13.0"} and third.command == ("train", "run.yaml")
    assert read_starts(tmp_path / "absent") == []


def test_a_sentence_says_program_machine_and_times(tmp_path: Path) -> None:
    folder = write(tmp_path, start(0), end(3600, "stopped"), start(7200, commit="fff0000", changes=False))
    text = in_words(read_starts(folder), until=10_800.0)
    assert text.startswith("Trained by modernbert-train 0.1.0, commit abc1234 with changes, torch 2.13.0, on 2 x H100;")
    assert "; then by modernbert-train 0.1.0, commit fff0000, torch" in text
    assert text.endswith("in 2 starts from 1970-01-01 00:00 UTC to 1970-01-01 03:00 UTC.")
    assert "node7" not in text and "run.yaml" not in text, "it is published"
    assert in_words([]) == ""


def test_a_record_of_anything_is_read(tmp_path: Path) -> None:
    odd = {"version": 7, "ranks": "two", "time": "now", "libraries": [1], "command": "rm", "commit": None, "tokens": -1}
    (found,) = read_starts(write(tmp_path, {"kind": "end"}, {"kind": "start", **odd}, {"kind": "news"}))
    assert (found.version, found.ranks, found.tokens, found.command) == ("", 0, 0, ())
    assert "an unknown version" in in_words([found])


def test_secrets_of_a_command_line_are_not_written_down() -> None:
    words = ["/home/me/bin/train", "a.yaml", "loggers.neptune.api_token=s3cret", "phases.short.tokens=9000"]
    words += ["--password", "hunter2", "data.train=https://me:s3cret@store/shards", "data.tokenizer=tok", "--fresh"]
    shown = command_line(words)
    assert shown == [
        "train", "a.yaml", f"loggers.neptune.api_token={HIDDEN}", "phases.short.tokens=9000", "--password", HIDDEN,
        f"data.train=https://me:{HIDDEN}@store/shards", "data.tokenizer=tok", "--fresh",
    ]  # fmt: skip


def test_a_wheel_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "CHECKOUT", None)
    here = provenance.here()
    assert here["commit"] is None and here["changes"] is None and here["libraries"]["torch"]
