"""The use of a run's time on its page. If the live page and the saved one disagreed, neither could be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modernbert_train.core.files import lock_now
from modernbert_train.report.document import WatchedRun
from modernbert_train.report.effective import FORMULA, spent
from modernbert_train.report.page import write_report
from tests.report.records import resume, step

NAMES = ("Effective training time", "Blocked by checkpoints", "Last checkpoint", "Restart time")
STARTS = [
    {"kind": "start", "time": 990.0},
    {"kind": "start", "time": 2000.0, "last_sign": 1012.0},
    {"kind": "first_step", "step": 5, "time": 2042.0},
]


def checkpoint(number: int, blocked: float) -> dict[str, Any]:
    costs = {"blocked_seconds": blocked, "write_seconds": 3.0}
    return {"kind": "checkpoint", "step": number, "tokens": number * 100, "time": 1001.0 + 2 * number} | costs


def write(run: Path, *entries: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def shown(watched: WatchedRun) -> dict[str, list[str]]:
    changes = watched.changes()
    assert changes is not None
    return {name: [value, note] for name, value, note in changes["tiles"]}


def tiles_of(run: Path, live: bool) -> dict[str, list[str]]:
    watched = WatchedRun(run, "run", live=live)
    while watched.refresh():
        pass
    return shown(watched)


def test_the_live_page_shows_what_the_still_one_does_with_the_formula(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, *(step(number) for number in range(1, 5)), checkpoint(4, 0.25), resume(4))
    write(run, step(5, time=2042.0), checkpoint(5, 0.5))
    (run / "starts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in STARTS))
    live, still, expected = tiles_of(run, True), tiles_of(run, False), spent(run)
    assert {name: live[name] for name in NAMES} == {name: still[name] for name in NAMES}
    assert live["Effective training time"] == [f"{100 * expected.effective:.1f} %".replace(".0 %", " %"), FORMULA]
    assert live["Blocked by checkpoints"] == ["0.75 s", "by 2, at most 0.5 s by one"]
    assert live["Last checkpoint"][0] == "step 5"
    assert live["Restart time"] == ["17 min", "median, from a process's last line to the next step"]
    assert FORMULA in write_report(run).read_text()


def test_it_grows_with_the_run_and_forgets_lost_steps(tmp_path: Path) -> None:
    """Adding line by line gives the same as reading everything."""
    run = tmp_path / "run"
    watched = WatchedRun(run, "run", live=True)
    watched.refresh()
    write(run, *(step(number) for number in range(1, 9)), checkpoint(3, 0.25), checkpoint(6, 0.5))
    for number in range(9, 40):
        write(run, step(number))
        watched.refresh()
        found = shown(watched)
        assert found["Blocked by checkpoints"][0] == "0.75 s" and found == tiles_of(run, True)
    assert found["Effective training time"] == tiles_of(run, False)["Effective training time"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 4))
    write(run, resume(4, time=1100.0), step(5, time=1103.0))
    watched.refresh()
    found, expected = shown(watched), spent(run)
    assert found["Blocked by checkpoints"][0] == "0.25 s" and found["Last checkpoint"][0] == "step 3"
    assert expected.steps == 10.0 and found["Effective training time"][0] == f"{100 * expected.effective:.1f} %"


def test_lines_that_hold_anything_are_no_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    odd = [{"kind": "step", "step": 1, "seconds": "x", "time": 1e300}, {"kind": "step", "step": 2, "seconds": 1e308},
           {"kind": "checkpoint", "step": -4, "blocked_seconds": -1}, {"kind": "checkpoint", "blocked_seconds": 1e308},
           {"kind": "checkpoint", "step": [], "time": -1e308}]  # fmt: skip
    write(run, *odd)
    (run / "starts.jsonl").write_text('{"kind": "start", "time": 1e308}\n[]\n{')
    assert tiles_of(run, True).keys() >= set(NAMES)


def test_a_run_that_trains_shows_how_far_it_has_come_and_when_it_ends(tmp_path: Path) -> None:
    """A reader of the live page wants this first; a run that has ended has zero time left."""
    run = tmp_path / "run"
    write(run, step(1) | {"tokens": 3_000, "seconds_left": 90.0})
    (run / "config.yaml").write_text("phases: {one: {tokens: 4000}, two: {tokens: 8000}}\n")
    assert not {"Progress", "Time left"} & {*tiles_of(run, True)}
    with (run / ".lock").open("w") as file:
        assert lock_now(file)
        live = tiles_of(run, True)
    assert live["Progress"] == ["25 %", "3 k of 12 k tokens"]
    assert live["Time left"][0] == "2 min" and live["Time left"][1].startswith("ends ")
