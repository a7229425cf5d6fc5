"""A checkpoint relies on the recorded lines of its steps. If they were still in memory, a kill would lose them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.saver import Saver
from modernbert_train.report.record import Reading
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
def test_the_lines_of_all_steps_are_in_the_file_before_their_checkpoint_is_written(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, seen = Saver.start, {}

    def look(self: Saver, snapshot: Any) -> None:
        lines = (tmp_path / "runs/tiny/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        seen[snapshot.step] = [entry["step"] for entry in entries if entry["kind"] == "step"]
        start(self, snapshot)

    monkeypatch.setattr(Saver, "start", look)
    monkeypatch.setattr(Reading, "is_here", lambda self: False)  # as on a GPU, which lags behind the host
    short = [
        "phases.short.tokens=900",
        "phases.long.tokens=1000",
        "checkpoint.interval_steps=1",
        "data.validation=null",
    ]
    assert main(["train", *tiny_run(*short)]) == 0
    assert len(seen) > 2 and seen == {step: list(range(1, step + 1)) for step in seen}
