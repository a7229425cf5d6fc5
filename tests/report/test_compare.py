"""Several runs on one page, read back: a curve under another run's name is a wrong decision about the next run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.__main__ import main
from modernbert_train.errors import DataError
from modernbert_train.report import write_comparison
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
    assert {"main run r0", "main run r1"} == set(names)


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
    heads = found.index("Faults") - found.index("Tokens")
    rows = [found.index(name, found.index("Faults")) for name in ("a", "b")]
    assert [found[row + 1 + heads] for row in rows] == ["0", "1"]


def test_the_tables_have_the_final_numbers_and_only_the_keys_that_differ(two: list[Path], tmp_path: Path) -> None:
    page = page_of(two, tmp_path / "c.html")
    found = cells(page)
    best = [text for tag, _, text in page.found if tag == "b"]
    assert "2.500" in found and "1.500" in best and best.count("2.500") == 1  # in the chart's legend alone
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


def test_many_runs_have_colours_for_all(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"r{n}", step(1), step(2)) for n in range(10)]
    text = write_comparison(folders, tmp_path / "c.html").read_text("utf-8")
    assert "main run r7" in text and "main run r1 again" in text
    assert all(f".r{n} {{ --line: var(--r{n}) }}" in text for n in range(8))


def test_on_the_command_line(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *map(str, two)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert main(["report", *map(str, two), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "comparison.html").read_bytes()
    assert main(["report", *map(str, two), "optim.lr=1"]) == 78
    assert "by their folders alone" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read"):
        write_comparison([two[0], tmp_path / "nothing"], tmp_path / "c.html")
