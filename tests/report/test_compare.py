"""Several runs on one page, read back: a curve under another run's name misleads the choice of the next run."""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.report.document import MIN_POINTS, POINTS, points_of
from modernbert_train.report.page import write_comparison
from tests.report.records import evaluation, resume, step, validation
from tests.support.report_page import Page, run


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Write a run of 60 steps at loss 3, and one of 30 at loss 2 with a restart and another rate."""
    return [
        run(tmp_path / "a", *(step(i) for i in range(1, 61)), validation(60, 2.5)),
        run(
            tmp_path / "b",
            *(step(i, 2.0) for i in range(1, 21)),
            resume(20),
            *(step(i, 2.0) for i in range(21, 31)),
            validation(30, 1.5),
            lr="0.002",
        ),
    ]


def page_of(folders: list[Path], out: Path) -> Page:
    return Page(write_comparison(folders, out).read_text("utf-8"))


def test_every_run_has_its_own_numbers(two: list[Path], tmp_path: Path) -> None:
    page = page_of(two, tmp_path / "c.html")
    a, b = page.run(0), page.run(1)
    assert [each["name"] for each in (a, b)] == ["a", "b"] and page.document()["title"] == "a, b"
    assert set(a["columns"]["loss"]) == {3} and set(b["columns"]["loss"]) == {2}
    assert [each["columns"]["tokens"][-1] for each in (a, b)] == [6_000, 3_000]
    assert [each["figures"]["Validation loss"] for each in (a, b)] == [[2.5, "2.500"], [1.5, "1.500"]]
    assert [each["settings"]["optim.lr"] for each in (a, b)] == ["0.001", "0.002"]
    assert [each["figures"]["Restarts"][0] for each in (a, b)] == [0, 1]


def test_runs_of_one_name_and_runs_without_a_configuration(tmp_path: Path) -> None:
    one, other = run(tmp_path / "x/same", step(1)), run(tmp_path / "y/same", config="")
    page = page_of([one, other], tmp_path / "c.html")
    assert [page.run(i)["name"] for i in (0, 1)] == [str(one), str(other)] and page.run(1)["settings"] == {}


def test_evaluations_are_curves_with_what_guessing_reaches(tmp_path: Path) -> None:
    odd = "<b>&"
    one = run(tmp_path / "a", step(1), step(2), evaluation(1), evaluation(2, accuracy=0.75), evaluation(2, odd, f1=0.5))
    found = page_of([one], tmp_path / "c.html").run()
    curves = {curve["title"]: curve for curve in found["curves"]}
    assert curves["sst2: accuracy"]["value"] == [0.6, 0.75] and curves["sst2: accuracy"]["guess"] == [0.5, None]
    assert f"{odd}: f1" in curves and found["figures"][f"{odd} f1"] == [0.5, "0.500"]


def test_the_more_runs_the_fewer_steps_of_each() -> None:
    """The page must stay small enough for a browser."""
    assert [points_of(runs) for runs in (0, 1, 100)] == [POINTS] * 3
    assert points_of(200) == POINTS // 2 and points_of(100_000) == MIN_POINTS


def test_on_the_command_line(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *map(str, two)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert main(["report", *map(str, two), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "comparison.html").read_bytes()
    assert main(["report", *map(str, two), "optim.lr=1"]) == 78
    assert "by their folders only" in capsys.readouterr().err
