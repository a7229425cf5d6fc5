"""Reading metrics.jsonl: a wrong history shows a run that did not happen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.report.curves import Following, History
from tests.report.records import read_history, resume, step, validation


def history_of(folder: Path, *records: dict[str, Any], tail: str = "") -> History:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    return read_history(path)


def test_steps_repeated_after_a_resume_replace_the_first_ones(tmp_path: Path) -> None:
    """Otherwise the curve covers the same tokens twice, once with discarded weights."""
    history = history_of(
        tmp_path, step(1), step(2), step(3, loss=9.0), validation(3, 9.0), resume(2), step(3, loss=4.0), step(4)
    )
    assert [(s.step, s.loss) for s in history.steps] == [(1, 3.0), (2, 3.0), (3, 4.0), (4, 3.0)]
    assert history.validations == []
    assert [(r.step, r.tokens, r.checkpoint) for r in history.restarts] == [(2, 200, "step-00000002")]
    assert history.repeated_steps == 1


def test_steps_that_go_back_without_a_resume_line_are_still_replaced(tmp_path: Path) -> None:
    """The resume line itself may be damaged."""
    history = history_of(tmp_path, step(1), step(2), step(3), step(2, loss=4.0))
    assert [(s.step, s.loss) for s in history.steps] == [(1, 3.0), (2, 4.0)]


def test_a_second_start_begins_again(tmp_path: Path) -> None:
    """A run killed before its first checkpoint starts from scratch in the same folder."""
    start = {"kind": "start", "step": 0, "tokens": 0, "time": 1000.0}
    history = history_of(tmp_path, start, step(1), step(2), start, step(1, loss=8.0))
    assert [s.loss for s in history.steps] == [8.0]
    assert [r.checkpoint for r in history.restarts] == [""]


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_left_out(tmp_path: Path, cut: int) -> None:
    """kill -9 while writing must not cost the report."""
    history = history_of(tmp_path, step(1), tail=json.dumps(step(2))[:cut])
    assert [s.step for s in history.steps] == [1]
    assert history.unreadable_lines == 1


def test_a_resume_written_behind_a_torn_line_is_found(tmp_path: Path) -> None:
    """The next process appends to the same file, so its first line may be joined to the torn one."""
    torn = json.dumps(step(2))[:50] + json.dumps(resume(1)) + "\n" + json.dumps(step(2, loss=4.0)) + "\n"
    history = history_of(tmp_path, step(1), tail=torn)
    assert len(history.restarts) == 1
    assert [s.loss for s in history.steps] == [3.0, 4.0]
    assert history.unreadable_lines == 1


def test_foreign_lines_and_missing_values_do_not_stop_the_reading(tmp_path: Path) -> None:
    """A line of another program version loses its own values only."""
    odd = {"kind": "step", "step": 1, "phase": "stable", "tokens": 100, "loss": None, "lr": "fast"}
    history = history_of(tmp_path, {"kind": "news"}, odd, tail="[1, 2]\nnull\n\n")
    assert math.isnan(history.steps[0].loss)
    assert math.isnan(history.steps[0].lr)
    assert history.unreadable_lines == 2


def test_phases_meet_at_the_last_token_of_the_phase_before(tmp_path: Path) -> None:
    """A boundary drawn one batch late would be behind the jump that it explains."""
    history = history_of(tmp_path, step(1), step(2), step(3, phase="decay"), step(4, phase="decay"))
    assert [(p.name, p.start, p.end, p.stop - p.first) for p in history.phases()] == [
        ("stable", 0, 200, 2),
        ("decay", 200, 400, 2),
    ]


def test_wall_time_leaves_out_the_pause_between_two_processes(tmp_path: Path) -> None:
    """Otherwise a night in the queue counts as training."""
    records = [step(1, time=1000.0), step(2, time=1010.0), resume(2, time=5000.0), step(3, time=5004.0)]
    history = history_of(tmp_path, *records)
    assert history.running_seconds == 14.0
    assert history.last_time - history.first_time == 4004.0


def test_a_record_that_grows_is_read_as_far_as_it_has_got(tmp_path: Path) -> None:
    """A partial line is left for the next read, and no byte is read twice."""
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(step(2)) + "\n"
    path.write_text(json.dumps(step(1)) + "\n" + whole[:30])
    following = Following(path)
    assert following.refresh() == (True, False) and [s.step for s in following.history.steps] == [1]
    assert following.refresh() == (False, False)
    with path.open("a") as file:
        file.write(whole[30:])
    assert following.refresh() == (True, False) and [s.step for s in following.history.steps] == [1, 2]
    assert following.history.unreadable_lines == 0


def test_a_record_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    """A resume rewrites it without the lines after its checkpoint; it may even be longer again by then."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step(i)) + "\n" for i in range(1, 5)))
    following = Following(path)
    following.refresh()
    for losses in ([1.0, 1.0], [7.0] * 9):
        path.write_text("".join(json.dumps(step(i, loss)) + "\n" for i, loss in enumerate(losses, 1)))
        following.refresh()
        assert [s.loss for s in following.history.steps] == losses
