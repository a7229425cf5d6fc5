"""The share of its time that a run has trained. If it is too high, a cluster that loses half of its time looks fine."""

from __future__ import annotations

import json
import math
from pathlib import Path

from modernbert_train.report.effective import spent, spent_by

STEPS = [{"kind": "step", "step": step, "seconds": 10.0, "time": 1000.0 + 12 * step} for step in range(1, 6)]
BEGUN = [
    {"kind": "start", "time": 1000.0},
    {"kind": "start", "time": 1040.0, "last_sign": 1030.0},
    {"kind": "first_step", "step": 3, "time": 1045.0},
    {"kind": "start", "time": 1050.0, "last_sign": 1047.0},  # killed before its first step
]


def test_the_share_is_of_steps_that_count_by_all_the_time() -> None:
    saved = [{"kind": "checkpoint", "step": 2, "blocked_seconds": 0.5, "write_seconds": 4.0, "time": 1030.0}]
    again = {"kind": "step", "step": 5, "seconds": 20.0, "time": 1090.0}  # repeated: counts once
    found = spent_by([*STEPS, *saved, again], BEGUN)
    assert found.steps == 60.0 and found.since_start == 90.0 and found.effective == 60 / 90
    assert found.restarts == (15.0,) and found.blocked == (0.5,) and found.writing == (4.0,)
    assert str(found) == (
        "effective training time 66.7 %: 1 min in steps that count, of 2 min since the first start; 1 checkpoint "
        "held steps up for 0.5 s, at most 0.5 s; 1 restart, 15 s from the last line to the next step, in the median"
    )


def test_records_that_say_nothing_or_nonsense_are_no_error(tmp_path: Path) -> None:
    assert math.isnan(spent(tmp_path).effective) and str(spent(tmp_path)) == "effective training time: not known"
    lines = [{"kind": "step", "step": 1, "seconds": "x", "time": None}, {"kind": "checkpoint", "blocked_seconds": -1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n{torn")
    assert spent(tmp_path).steps == 0.0
