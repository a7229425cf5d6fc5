"""Evaluations on the pages: whatever figures a run recorded, under the right name, beside what guessing reaches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from modernbert_train.report.curves import read_history
from modernbert_train.report.summary import figures
from tests.report.records import evaluation, resume, step
from tests.report.test_compare import page_of as compared_page
from tests.report.test_compare import run
from tests.report.test_page import page_of, run_folder

STEPS = [step(i) for i in range(1, 61)]


def test_a_figure_is_a_chart_with_a_line_for_each_evaluation(tmp_path: Path) -> None:
    """In the order in which they came; a baseline from edge to edge, counts not at all."""
    lines = [
        evaluation(20), evaluation(20, "nli", accuracy=0.4, f1=0.3), evaluation(40, accuracy=0.7),
        evaluation(40, "nli", accuracy=math.nan, f1=0.2),
    ]  # fmt: skip
    page = page_of(run_folder(tmp_path, *STEPS, *lines))
    titles = page.texts("h2")
    at = titles.index("Evaluations: accuracy")
    assert titles[at + 1] == "Evaluations: f1" and "Evaluations: num_texts" not in titles
    accuracy, f1 = page.data()["charts"][at : at + 2]
    assert [line["text"] for line in accuracy] == [
        ["0.600", "0.700"], ["0.500", "0.500", "not a number", "not a number"], ["0.400", "not a number"],
    ]  # fmt: skip
    assert [line["text"] for line in f1] == [["0.300", "0.200"]]
    names = [text for text in page.texts("span") if text]
    assert {"sst2", "sst2, baseline", "nli"} <= set(names)
    curves = {str(a.get("class")) for tag, a, _ in page.found if tag == "path"}
    assert {"main", "main s1", "dashed"} <= curves
    cells = page.texts("td")
    at = cells.index("sst2")
    assert cells[at : at + 6] == ["sst2", "accuracy", "0.700", "none", "0.700 at 4 k", ""]
    at = cells.index("nli")
    assert cells[at : at + 5] == ["nli", "accuracy", "none", "none", "0.400 at 2 k"]


def test_a_run_without_evaluations_has_nothing_of_them(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, *STEPS))
    assert not [title for title in page.texts("h2") if "valuation" in title]


def test_what_a_resume_made_void_is_forgotten_and_what_was_repeated_counts_once(tmp_path: Path) -> None:
    lines = [*STEPS[:30], evaluation(20), evaluation(30, accuracy=0.9), resume(20), *STEPS[20:], evaluation(30)]
    history = read_history(run_folder(tmp_path, *lines, evaluation(30, accuracy=0.8)) / "metrics.jsonl")
    assert [(e.step, e.figures["accuracy"]) for e in history.evaluations] == [(20, 0.6), (30, 0.8)]


def test_runs_are_compared_by_each_figure_and_the_table_has_the_last(tmp_path: Path) -> None:
    """A run that was not evaluated has no line and says so; a name that is HTML is text."""
    odd = "<b>&"
    one = run(tmp_path / "a", *STEPS, evaluation(20), evaluation(40, accuracy=0.75), evaluation(40, odd, f1=0.5))
    two = run(tmp_path / "b", *STEPS, evaluation(30, accuracy=0.25))
    three = run(tmp_path / "c", *STEPS)
    page = compared_page([one, two, three], tmp_path / "c.html")
    at = page.texts("h2").index("sst2: accuracy")
    assert page.texts("h2")[at + 1] == f"{odd}: f1"
    drawn = page.data()["charts"][at]
    assert [(line["run"], line["text"]) for line in drawn] == [(0, ["0.600", "0.750"]), (1, ["0.250"])]
    assert {"sst2 accuracy", f"{odd} f1"} <= set(page.texts("th"))
    assert page.texts("td").count("0.750") == 1 and page.texts("td").count("0.250") == 1
    assert figures(read_history(two / "metrics.jsonl"))["sst2 accuracy"].text == "0.250"


@pytest.mark.runs
def test_a_record_of_thousands_of_names_is_drawn_within_bounds(tmp_path: Path) -> None:
    """What a broken disk or a stranger's run holds must not make a page that no browser opens."""
    many = {f"figure{i}": 0.5 for i in range(2000)}
    lines = [evaluation(10, f"{'x' * 500}{i}", **many) for i in range(40)]
    folder = run(tmp_path / "a", *STEPS, *lines)
    page = page_of(folder)
    assert sum(title.startswith("Evaluations: ") for title in page.texts("h2")) == 24
    assert max(len(title) for title in page.texts("h2")) < 100
    assert len(compared_page([folder, folder], tmp_path / "c.html").data()["charts"]) == 6 + 24
