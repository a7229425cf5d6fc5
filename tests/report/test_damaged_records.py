"""Damaged records of a run: every reader skips unreadable lines, or names the file.

If this breaks, one bad sector in a log costs the report, the export or the next start of a run of weeks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.sweeps.trial import diverged, figure, milestones, read_entries, tokens_seen
from modernbert_train.errors import DataError
from modernbert_train.report.page import write_comparison, write_report
from tests.report.records import evaluation, fault, read_history, resume, step, validation

RUBBISH = [bytes(range(256)), b"\xff" * 40, b"[" * 100_000, b"[1, 2]", b"null", b'{"kind": {}}', b'{"step":' * 9]
WHOLE: list[dict[str, Any]] = [
    step(1), validation(1), resume(1), step(2), fault(3, "skip"), step(4), validation(4), evaluation(4),
    evaluation(4, "other"),
]  # fmt: skip
odd = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.integers(), st.sampled_from([10**400, -1, 1e308, -1e308, 2**63]),
    st.floats(allow_nan=True), st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=2), st.none()),
)  # fmt: skip


def put(folder: Path, entries: list[dict[str, Any]], rubbish: list[bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(entry).encode() for entry in entries]
    for name in ("metrics.jsonl", "faults.jsonl"):
        (folder / name).write_bytes(b"\n".join([*rubbish, *lines, *rubbish, b""]))
    return folder


def test_rubbish_is_counted_and_hides_nothing(tmp_path: Path) -> None:
    run = put(tmp_path / "run", WHOLE, RUBBISH)
    history = read_history(run / "metrics.jsonl")
    assert [each.step for each in history.steps] == [1, 2, 4] and len(history.faults) == 1
    assert history.unreadable_lines >= 2 * (len(RUBBISH) - 1)
    assert f"{history.unreadable_lines} lines of metrics.jsonl could not be read" in write_report(run).read_text()
    assert len(read_entries(run)) == len(WHOLE) + 2  # and two objects of an unknown kind


@pytest.mark.runs
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_field_may_hold_anything(tmp_path: Path, data: st.DataObject) -> None:
    """Any JSON type, and values outside the bounds of floats, calendars and axes."""
    entries = [dict(entry) for entry in WHOLE]
    for _ in range(data.draw(st.integers(1, 8))):
        entry = data.draw(st.sampled_from(entries))
        entry[data.draw(st.sampled_from([*entry]))] = data.draw(odd)
    run = put(tmp_path / "run", entries, [])
    write_report(run)
    write_comparison([run, run], tmp_path / "comparison.html")
    found = read_entries(run)
    assert tokens_seen(found) >= 0
    assert all(isinstance(value, float) for value in milestones(found, "validation.loss", 100).values())
    assert (value := figure(found, "step.loss")) is None or math.isfinite(value)
    diverged(run)


def test_a_record_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    run = put(tmp_path / "run", WHOLE, [])
    (run / "faults.jsonl").unlink()
    (run / "faults.jsonl").mkdir()
    write_report(run)  # no file, no faults
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read .* Give the folder of a run"):
        write_report(run)
