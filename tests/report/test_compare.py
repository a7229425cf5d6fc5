"""Several runs on one page, read back: a curve under another run's name is a wrong decision about the next run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.errors import DataError
from modernbert_train.report import write_comparison
from modernbert_train.report.compare import render_comparison
from modernbert_train.report.curves import Fault, History, Restart, StepRecord
from modernbert_train.report.runs_table import Run
from tests.report.records import fault, resume, step, validation
from tests.report.test_page import Page

CONFIG = (
    "name: {name}\nruns_folder: runs\noptim:\n  lr: {lr}\n  name: stable_adamw\nphases:\n  stable:\n    tokens: 9000\n"
)


def run(folder: Path, *records: dict[str, Any], lr: str = "0.001", config: str = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if config:
        (folder / "config.yaml").write_text(config.format(name=json.dumps(folder.name), lr=lr))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """60 steps at loss 3, and 30 at loss 2 with a restart, another rate, and a phase's key that the first lacks."""
    longer = CONFIG + "    lr_ratio: 0.5\n"
    return [
        run(tmp_path / "a", *(step(i) for i in range(1, 61)), validation(60, 2.5)),
        run(
            tmp_path / "b",
            *(step(i, 2.0) for i in range(1, 21)),
            resume(20),
            *(step(i, 2.0) for i in range(21, 31)),
            validation(30, 1.5),
            lr="0.002",
            config=longer,
        ),
    ]


def page_of(folders: list[Path], out: Path) -> Page:
    return Page(write_comparison(folders, out).read_text("utf-8"))


def cells(page: Page) -> list[str]:
    """All texts of table cells in order, with those of what stands in them."""
    return [text for tag, _, text in page.found if tag in ("td", "th", "b", "span") and text]


def test_every_chart_has_a_curve_of_each_run_over_common_tokens(two: list[Path], tmp_path: Path) -> None:
    page = page_of(two, tmp_path / "c.html")
    titles = page.texts("h2")[:6]
    assert [title.split(",")[0] for title in titles] == [
        "Training loss", "Validation loss", "Gradient norm", "Learning rate", "Batch size", "Tokens per second",
    ]  # fmt: skip
    data = page.data()
    assert [len(chart) for chart in data["charts"]] == [2] * 6
    losses = data["charts"][0]
    assert [line["text"][-1] for line in losses] == ["3.000", "2.000"]
    assert [line["x"][-1] for line in losses] == [10_000, 5_000]  # 6,000 and 3,000 tokens on one axis
    assert data["steps"]["x"][0] == 0 and data["steps"]["x"][-1] == 10_000
    assert data["steps"]["text"][250] == "3 k tokens"
    names = [a["class"] for t, a, _ in page.found if t == "path" and str(a.get("class")).startswith("main run")]
    assert set(names) == {"main run r0 d0", "main run r1 d1", "main run r0 d0 lone", "main run r1 d1 lone"}


def test_restarts_are_marked_in_the_colour_of_their_run(two: list[Path], tmp_path: Path) -> None:
    page = page_of(two, tmp_path / "c.html")
    assert page.texts("title")[1:] == ["b: restart from step-00000020"] * 6
    assert sum(t == "g" and a.get("class") == "restart run r1" for t, a, _ in page.found) == 6


def test_faults_are_marked_once_and_counted(two: list[Path], tmp_path: Path) -> None:
    """Two runs of one recipe, of which one skipped batches, are not equals."""
    with (two[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(fault(31, "skip")) + "\n")
    page = page_of(two, tmp_path / "c.html")
    assert page.texts("title").count("b: step 31: loss or gradient not finite, update left out") == 1
    assert sum(t == "g" and a.get("class") == "fault run r1" for t, a, _ in page.found) == 1
    found = cells(page)
    heads = found.index("Faults") - found.index("Training loss")
    rows = [found.index(name, found.index("Faults")) for name in ("a", "b")]
    assert [found[row + 1 + heads] for row in rows] == ["0", "1"]


def test_the_tables_have_the_final_numbers_and_only_the_keys_that_differ(two: list[Path], tmp_path: Path) -> None:
    page = page_of(two, tmp_path / "c.html")
    found = cells(page)
    assert "2.500" in found and page.texts("b") == ["1.500"]  # the best
    at = found.index("optim.lr")
    assert found[at : at + 3] == ["optim.lr", "0.001", "0.002"]
    at = found.index("phases.stable.lr_ratio")
    assert found[at : at + 3] == ["phases.stable.lr_ratio", "absent", "0.5"]
    keys = ("name", "runs_folder", "optim.name", "phases.stable.tokens")
    assert not set(keys) & set(found)


def test_phases_are_shown_only_where_all_runs_have_the_same(two: list[Path], tmp_path: Path) -> None:
    assert page_of(two, tmp_path / "c.html").texts("text", "phase") == ["stable"] * 6
    other = run(tmp_path / "d", *(step(i, phase="decay") for i in range(1, 61)))
    assert page_of([*two, other], tmp_path / "c.html").texts("text", "phase") == []


def test_mfu_and_waiting_are_drawn_where_they_were_measured(two: list[Path], tmp_path: Path) -> None:
    measured = [step(i) | {"mfu": 0.4, "data_wait_share": 0.01} for i in range(1, 10)]
    page = page_of([two[0], run(tmp_path / "d", *measured)], tmp_path / "c.html")
    assert len(page.data()["charts"]) == 8 and "40 %" in cells(page)


def test_runs_of_one_name_unfinished_runs_and_runs_without_a_configuration(tmp_path: Path) -> None:
    one = run(tmp_path / "x/same", step(1), step(2, float("nan")))
    other = run(tmp_path / "y/same", config="")
    page = page_of([one, other], tmp_path / "c.html")
    assert {str(one), str(other)} <= set(cells(page))
    assert any(text.startswith(f"{one}: 1 step with a loss that is not a number") for text in page.texts("p"))
    assert any(text.startswith("Without a config.yaml") and str(other) in text for text in page.texts("p"))


def test_names_and_values_from_outside_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)<"
    folders = [run(tmp_path / evil, step(1)), run(tmp_path / "b", step(1), lr="'</script><b>'")]
    text = write_comparison(folders, tmp_path / "c.html").read_text("utf-8")
    assert len(Page(text).texts("script")) == 2 and "alert(1)<" not in text


def test_the_page_asks_nobody_and_is_the_same_again(two: list[Path], tmp_path: Path) -> None:
    text = write_comparison(two, tmp_path / "c.html").read_text("utf-8")
    assert write_comparison(two, tmp_path / "c.html").read_text("utf-8") == text
    assert "http" not in text.replace("http-equiv", "") and "url(" not in text and "@import" not in text


def test_a_hundred_runs_have_one_legend(tmp_path: Path) -> None:
    """A legend in every chart would fill the screen before each of them."""
    folders = [run(tmp_path / f"r{n}", *(step(i) for i in range(1, 4)), lr=f"{n}e-5") for n in range(100)]
    page = page_of(folders, tmp_path / "c.html")
    assert cells(page).count("r57") == 1
    assert len([a for t, a, _ in page.found if t == "tr" and a.get("data-run")]) == 100
    figures = [a for t, a, _ in page.found if t == "figure"]
    lines = [a["data-run"] for t, a, _ in page.found if t == "path" and a.get("data-run")]
    assert len(figures) == 6 and lines.count("57") == 5  # of all charts but validation, which has no values
    assert page.texts("title")[0].startswith("r0, r1, ") and len(page.texts("title")[0]) == 100


def test_settings_of_many_runs_are_columns_and_of_few_a_table_of_their_own(two: list[Path], tmp_path: Path) -> None:
    """A column for each of 100 runs cannot be read, nor can 40 columns of keys for two runs."""
    few = page_of(two, tmp_path / "c.html")
    assert [a["id"] for t, a, _ in few.found if t == "table"] == ["runs", "settings"]
    others = [run(tmp_path / f"r{n}", step(1), lr=f"{n}e-5") for n in range(6)]
    many = page_of([*two, *others], tmp_path / "c.html")
    assert [a["id"] for t, a, _ in many.found if t == "table"] == ["runs"]
    found = cells(many)
    assert found[found.index("Faults") + 1 :][:2] == ["optim.lr", "phases.stable.lr_ratio"]
    assert found[found.index("b") : found.index("r0")][-2:] == ["0.002", "0.5"]


def test_long_values_are_shortened_and_whole_in_their_title(two: list[Path], tmp_path: Path) -> None:
    value = "/mnt/" + "a-long-folder/" * 20 + "seven"
    page = page_of([two[0], run(tmp_path / "c", step(1), lr=value)], tmp_path / "c.html")
    [(short, title)] = [(text, a["title"]) for t, a, text in page.found if t == "td" and "title" in a]
    assert title == value and len(short) == 48 and short.startswith("/mnt/a-long") and short.endswith("/seven")


def test_a_single_validation_is_a_dot_in_its_run_s_colour(two: list[Path], tmp_path: Path) -> None:
    page = page_of(two, tmp_path / "c.html")
    dots = [(a["class"], a["data-run"]) for t, a, _ in page.found if t == "path" and "lone" in str(a.get("class"))]
    assert dots == [("main run r0 d0 lone", "0"), ("main run r1 d1 lone", "1")]


def test_the_page_can_be_read_without_its_script(two: list[Path], tmp_path: Path) -> None:
    """Curves, names and numbers stand in it; what only the script can do is hidden until there is one."""
    page = page_of(two, tmp_path / "c.html")
    assert [a for t, a, _ in page.found if t == "div" and a.get("class") == "tools"] == [
        {"class": "tools", "hidden": None}
    ]
    assert [a.get("open", "shut") for t, a, _ in page.found if t == "details"] == [None]
    assert {"a", "b", "3.000", "2.000", "optim.lr"} <= set(cells(page))


@pytest.mark.runs
def test_the_page_of_a_hundred_long_runs_is_bounded(tmp_path: Path) -> None:
    """20,000 points in a chart, shared by its lines: more runs or steps make it coarser and not larger."""
    rough = [math.sin(7.0 * i * i) + 3 for i in range(450)]
    steps = [
        StepRecord(i, "stable", i * 4096.0, 64.0 + i, rough[i], rough[i] / 1e3, rough[i], 3e5 * rough[i], 0.99,
                   rough[i] / 9, rough[i] / 8) for i in range(450)
    ]  # fmt: skip
    restarts = [Restart(i, i * 4096.0, f"step-{i:08d}", 1.0) for i in range(0, 450, 5)]
    faults = [Fault(i, i * 4096.0, "spike", "skip", 9.0, "", 1.0) for i in range(450)]
    history = History(steps, restarts=restarts, faults=faults)
    text = render_comparison([Run(f"run-{n}", history, {"seed": str(n)}) for n in range(100)])
    assert len(text.encode()) < 6_000_000
    charts = Page(text).data()["charts"]
    assert len(charts) == 8 and all(len(line["x"]) <= 202 for chart in charts for line in chart)
    assert max(line["y"] != [] and max(line["y"]) for line in charts[2]) > 9_000  # extremes survive


def test_warnings_of_many_runs_are_folded(tmp_path: Path) -> None:
    """Else a hundred boxes stand before the first chart."""
    folders = [run(tmp_path / f"r{n}", step(1), step(2, math.nan)) for n in range(5)]
    assert "Warnings of 5 runs" in page_of(folders, tmp_path / "c.html").texts("summary")
    assert page_of(folders[:4], tmp_path / "c.html").texts("summary") == ["Runs"]


def test_on_the_command_line(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *map(str, two)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert main(["report", *map(str, two), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "comparison.html").read_bytes()
    assert main(["report", *map(str, two), "optim.lr=1"]) == 78
    assert "by their folders alone" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read"):
        write_comparison([two[0], tmp_path / "nothing"], tmp_path / "c.html")
