"""Evaluations of a run: every recorded figure under its name, with its baseline."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from modernbert_train.report.summary import figures
from tests.report.records import evaluation, read_history, resume, step
from tests.support.report_page import page_of, run_folder, table_of

STEPS = [step(i) for i in range(1, 61)]


def test_the_table_has_the_last_the_baseline_and_the_highest(tmp_path: Path) -> None:
    lines = [
        evaluation(20), evaluation(20, "nli", accuracy=0.4, f1=0.3), evaluation(40, accuracy=0.7),
        evaluation(40, "nli", accuracy=math.nan, f1=0.2),
    ]  # fmt: skip
    folder = run_folder(tmp_path, *STEPS, *lines)
    run = page_of(folder).run()
    assert table_of(run, "Evaluations")[:2] == [
        ["sst2", "accuracy", "0.700", "none", "0.700 at 4 k", ""],
        ["nli", "accuracy", "none", "none", "0.400 at 2 k", ""],
    ]
    titles = [curve["title"] for curve in run["curves"]]
    assert titles[2:] == ["sst2: accuracy", "nli: accuracy", "nli: f1"]  # no counts
    assert figures(read_history(folder / "metrics.jsonl"))["nli f1"].text == "0.200"


def test_a_run_without_evaluations_has_nothing_of_them(tmp_path: Path) -> None:
    run = page_of(run_folder(tmp_path, *STEPS)).run()
    assert run["curves"] == [] and "Evaluations" not in [table["title"] for table in run["tables"]]


def test_what_a_resume_made_void_is_forgotten_and_what_was_repeated_counts_once(tmp_path: Path) -> None:
    lines = [*STEPS[:30], evaluation(20), evaluation(30, accuracy=0.9), resume(20), *STEPS[20:], evaluation(30)]
    history = read_history(run_folder(tmp_path, *lines, evaluation(30, accuracy=0.8)) / "metrics.jsonl")
    assert [(e.step, e.figures["accuracy"]) for e in history.evaluations] == [(20, 0.6), (30, 0.8)]


@pytest.mark.runs
def test_a_record_of_thousands_of_names_is_drawn_within_bounds(tmp_path: Path) -> None:
    """A broken disk or an untrusted run must not produce a page that browsers cannot open."""
    many = {f"figure{i}": 0.5 for i in range(2000)}
    lines = [evaluation(10, f"{'x' * 500}{i}", **many) for i in range(40)]
    curves = page_of(run_folder(tmp_path, *STEPS, *lines)).run()["curves"]
    assert len(curves) == 2 + 24 and max(len(curve["title"]) for curve in curves) < 140
