"""The page of a run as a file, and the document in it: it must show exactly the recorded run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.errors import StorageError
from modernbert_train.report.page import write_report
from tests.report.records import fault, resume, step, validation
from tests.support.report_page import Page, page_of, run_folder, sample, table_of


@pytest.fixture
def records() -> list[dict[str, Any]]:
    stable = [step(i, loss=11.0 - i / 20) for i in range(1, 101)]
    decay = [step(i, loss=5.0, phase="decay") for i in range(101, 151)]
    return [*stable, validation(100), resume(100), *decay, validation(150, 4.5, "decay")]


def test_the_document_tells_what_the_run_did(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    run = page_of(run_folder(tmp_path, *records)).run()
    tiles = {name: value for name, value, _ in run["tiles"]}
    wanted = {"Tokens": "15 k", "Steps": "150", "Training loss": "5.000", "Validation loss": "4.500", "Restarts": "1"}
    assert wanted.items() <= tiles.items()
    assert run["columns"]["step"] == list(range(1, 151)) and run["columns"]["tokens"][-1] == 15_000
    assert run["columns"]["loss"][0] == 10.95 and run["means"] == {}
    assert run["columns"]["seconds"][0] == 0 and run["columns"]["seconds"] == sorted(run["columns"]["seconds"])
    assert {len(column) for column in run["columns"].values()} == {150}
    assert run["phases"] == [[0, 0.0, "stable"], [100, 10_000.0, "decay"]]
    assert run["events"] == [["restart", 100, 10_000.0, "restart from step-00000100"]]
    loss, accuracy = run["curves"]
    assert loss["value"] == [2.5, 4.5] and loss["guess"] == [7, 7] and loss["tokens"] == [10_000, 15_000]
    assert accuracy["title"].startswith("Held-out accuracy") and accuracy["form"] == "percent"
    assert [row[0] for row in table_of(run, "Phases")] == ["stable", "decay"]


def test_terms_of_a_loss_are_columns_and_what_a_run_lacks_is_none(tmp_path: Path) -> None:
    both = [step(i) | {"loss/mlm": 2.0, "loss/sop": 0.5, "mfu": 0.4} for i in range(1, 5)]
    columns = page_of(run_folder(tmp_path, *both)).run()["columns"]
    assert columns["loss/sop"] == [0.5] * 4 and columns["mfu"] == [0.4] * 4
    assert "data_wait_share" not in columns


def test_a_loss_that_is_not_a_number_is_a_gap_and_is_reported(tmp_path: Path) -> None:
    """A diverged run must not look fine, and must not break the page."""
    losses = [3.0, 2.9, math.nan, math.inf, 2.8, 2.7]
    run = page_of(run_folder(tmp_path, *(step(i, loss) for i, loss in enumerate(losses, 1)))).run()
    assert run["columns"]["loss"] == [3.0, 2.9, None, None, 2.8, 2.7]
    assert "2 steps with a loss that is not a number, first at step 3" in run["warnings"][0]


def test_faults_are_marked_and_listed(tmp_path: Path) -> None:
    """A run that skipped updates, rolled back or was stopped must not look like an undisturbed one."""
    folder = run_folder(
        tmp_path,
        *(step(i) for i in range(1, 21)),
        resume(20, time=1043.0),
        fault(21, "skip", time=1044.0),
        *(step(i, time=1044.0 + i) for i in range(22, 40)),
        fault(40, "roll_back", "spike", 12.0, to="step-00000020", time=1090.0),
    )
    told = [fault(21, "stop", time=1042.5), fault(21, "skip", time=1044.0)]
    (folder / "faults.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in told))
    run = page_of(folder).run()
    assert [(kind, tokens, what) for kind, _, tokens, what in run["events"][1:]] == [
        ("fault", 2000.0, "step 21: loss or gradient not finite, update left out"),
        ("fault", 3900.0, "step 40: the loss jumped, back to step-00000020"),
        ("fault", 2000.0, "step 21: loss or gradient not finite, run stopped"),
    ]
    rows = table_of(run, "Faults and restarts")
    assert [row[5] for row in rows] == [
        "run stopped", "from step-00000020", "update left out", "back to step-00000020",
    ]  # fmt: skip
    assert page_of(run_folder(tmp_path, step(1))).run()["tables"][0]["title"] == "Phases"


@pytest.mark.runs
@pytest.mark.parametrize("all_broken", [False, True])
def test_many_steps_stay_a_small_page(tmp_path: Path, all_broken: bool) -> None:
    """Also if every loss is broken, which marks every step."""
    lines = [
        json.dumps(step(i, math.nan if all_broken else 99.0 if i == 14_321 else 2 + 1 / i)) for i in range(1, 30_001)
    ]
    path = write_report(run_folder(tmp_path, tail="\n".join(lines)))
    assert path.stat().st_size < 1_000_000
    run = Page(path.read_text("utf-8")).run()
    assert len(run["columns"]["step"]) <= 2_020 and run["total"] == 30_000
    if not all_broken:
        assert 99.0 in run["columns"]["loss"]  # the one spike survives
        assert max(value for value in run["means"]["loss"] if value != 99.0) < 6


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, count: int) -> None:
    start = {"kind": "start", "step": 0, "tokens": 0, "time": 1.0}
    run = page_of(run_folder(tmp_path, start, *[step(1)] * count, config="")).run()
    assert run["total"] == count and run["config"] == "" and run["settings"] == {}


def test_the_page_asks_nobody_for_anything(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """A run's page is opened on machines without a network, and must not contact any server."""
    page = page_of(run_folder(tmp_path, *records))
    assert not [a for t, a, _ in page.found if "src" in a or (t != "link" and "href" in a)]
    policy = next(a["content"] for t, a, _ in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'") and "connect-src" not in str(policy)
    assert not re.search(r"url\(|@import|XMLHttpRequest", "".join(page.texts("style")))


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    """A phase, a checkpoint or a configuration may contain anything; none of it may run as a script."""
    evil = "</script><script>alert(1)</script>"
    back = {**resume(1), "checkpoint": evil}
    folder = run_folder(tmp_path, step(1, phase=evil), back, step(2, phase=evil), config=f"name: '{evil}'\n")
    page = page_of(folder)
    assert len(page.texts("script")) == 2
    assert page.run()["phases"][0][2] == evil and page.run()["config"] == f"name: '{evil}'\n"


def test_a_reader_without_javascript_has_the_figures(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    assert {"a-run", "5.000", "4.500"} <= set(page_of(run_folder(tmp_path, *records)).texts("td"))


def test_the_same_run_gives_the_same_bytes_and_leaves_no_other_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, step(1), step(2))
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_a_page_that_cannot_be_written_says_so_and_keeps_the_old_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, step(1))
    (folder / "report.html").mkdir()
    with pytest.raises(StorageError, match=r"report\.html: cannot be written"):
        write_report(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_samples_are_those_that_still_count(tmp_path: Path) -> None:
    """Repeated steps, torn lines and lines of other kinds are left out."""
    folder = run_folder(tmp_path, step(1))
    lines = [sample(1), sample(2), sample(3), sample(2, " mouse"), {"texts": 3}]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "sam')
    found = page_of(folder).run()["samples"]
    assert [each["step"] for each in found] == [1, 2]
    assert found[1]["texts"][0]["predicted"][0]["guesses"][0] == [" mouse", 0.5]
