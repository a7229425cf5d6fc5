"""The page and the picture, read back with parsers: what a reader sees must be what the run did."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.errors import StorageError
from modernbert_train.report import write_loss_svg, write_report
from modernbert_train.report.chart import Chart, Line, Marks, Scale, draw, label_rows
from modernbert_train.text import duration, percent, rate, tokens_text
from tests.report.records import fault, resume, step, validation

VOID = {"meta", "link", "br", "wbr", "input"}


class Page(HTMLParser):
    """Collects elements as (tag, attributes, own text) and refuses a page whose tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"left open: {[self.found[i][0] for i in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))
        if tag not in VOID:
            self.open.append(len(self.found) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, attributes, text = self.found[self.open[-1]]
            self.found[self.open[-1]] = (tag, attributes, text + data)

    def texts(self, tag: str, cls: str | None = None) -> list[str]:
        return [x for t, a, x in self.found if t == tag and (cls is None or a.get("class") == cls)]

    def tile(self, name: str) -> str:
        names, values = self.texts("dt"), self.texts("dd")
        return values[names.index(name)]

    def data(self) -> dict[str, Any]:
        data = next(x for t, a, x in self.found if t == "script" and a.get("type") == "application/json")
        parsed = json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(parsed, dict)
        return parsed


def run_folder(tmp_path: Path, *records: dict[str, Any], tail: str = "", config: str | None = "name: a\n") -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text("utf-8"))


@pytest.fixture
def records() -> list[dict[str, Any]]:
    stable = [step(i, loss=11.0 - i / 20) for i in range(1, 101)]
    decay = [step(i, loss=5.0, phase="decay") for i in range(101, 151)]
    return [*stable, validation(100), resume(100), *decay, validation(150, 4.5, "decay")]


def test_summary_tells_what_the_run_did(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = page_of(run_folder(tmp_path, *records))
    assert page.tile("Tokens") == "15 k"
    assert page.tile("Steps") == "150"
    assert page.tile("Training loss") == "5.000"
    assert page.tile("Validation loss") == "4.500"
    assert page.tile("Unigram baseline") == "7.000"
    assert page.tile("Accuracy") == "50 %"
    assert page.tile("Tokens per second") == "50"
    assert page.tile("Restarts") == "1"


def test_phases_are_labelled_and_restarts_marked_in_every_chart(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = page_of(run_folder(tmp_path, *records))
    charts = [a for t, a, _ in page.found if t == "figure"]
    labels = [x.strip(" ▸") for x in page.texts("text", "phase")]
    assert len(charts) == 7
    assert labels == ["stable", "decay"] * 7
    assert page.texts("title").count("restart from step-00000100") == 7
    border = next(a for t, a, _ in page.found if t == "line" and a.get("class") == "border")
    assert border["x1"] == "66.667%"  # 10,000 of 15,000 tokens


def test_every_chart_has_its_values_for_the_hover(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """The script indexes these arrays side by side; a missing one would break all charts."""
    data = page_of(run_folder(tmp_path, *records)).data()
    assert len(data["charts"]) == 7
    for line in (line for chart in data["charts"] for line in chart):
        assert len(line["x"]) == len(line["y"]) == len(line["text"]) > 0
        assert line["x"] == sorted(line["x"])
    assert data["steps"]["text"][-1] == "step 150 · 15 k tokens · decay"
    assert data["charts"][0][0]["text"][0] == "10.950"


def test_a_loss_that_is_not_a_number_is_a_gap_and_is_told(tmp_path: Path) -> None:
    """A run that diverged must not look fine, and must not break the page either."""
    losses = [3.0, 2.9, math.nan, math.inf, 2.8, 2.7]
    page = page_of(run_folder(tmp_path, *(step(i, loss) for i, loss in enumerate(losses, 1))))
    raw = page.data()["charts"][0][0]
    assert [y is None for y in raw["y"]] == [False, False, True, True, False, False]
    assert raw["text"][2] == "not a number"
    path = next(a["d"] for t, a, _ in page.found if t == "path" and a.get("class") == "faint" and a["d"] != "M0 0H22")
    assert path is not None
    assert path.count("M") == 2
    assert any("2 steps with a loss that is not a number, first at step 3" in x for x in page.texts("p"))
    assert page.texts("title").count("loss not a number") == 2


def faulty_run(tmp_path: Path) -> Path:
    """Stopped at step 21, gone on from step 20 by skipping it; a jump let pass, another rolled back; resumed once more.
    A skipped step that the last resume made void is not counted."""
    folder = run_folder(
        tmp_path,
        *(step(i) for i in range(1, 21)),
        resume(20, time=1043.0),
        fault(21, "skip", time=1044.0),
        *(step(i, time=1044.0 + i) for i in range(22, 40)),
        fault(30, "ignore", "spike", 9.0, time=1075.0),
        fault(40, "roll_back", "spike", 12.0, to="step-00000020", time=1090.0),
        *(step(i, time=1100.0 + i) for i in range(41, 60)),
        fault(60, "skip", time=1170.0),
        resume(50, time=2000.0),
        *(step(i, time=2000.0 + i) for i in range(51, 101)),
    )
    told = [fault(21, "stop", time=1042.5), fault(21, "skip", time=1044.0), fault(60, "skip", time=1170.0)]
    (folder / "faults.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in told))
    return folder


def test_faults_are_marked_on_the_loss_chart_and_listed(tmp_path: Path) -> None:
    """A run that skipped, went back or was stopped on its way must not look like one that ran through."""
    page = page_of(faulty_run(tmp_path))
    marks = [x for x in page.texts("title") if x.startswith("step ")]
    assert marks == [
        "step 21: loss or gradient not finite, update left out; step 21: loss or gradient not finite, run stopped",
        "step 30: the loss jumped, let pass",
        "step 40: the loss jumped, back to step-00000020",
    ]
    places = [a.get("x") for t, a, _ in page.found if t == "svg" and str(a.get("x")).endswith("%")]
    assert places == ["20.0%", "29.0%", "39.0%"]  # tokens before the batch, of 10,000
    cells = [text for tag, _, text in page.found if tag == "td"]
    table = [cells[i : i + 6] for i in range(len(cells) - 36, len(cells), 6)]
    assert [line[1] + " " + line[3] + " " + line[5] for line in table] == [
        "21 loss or gradient not finite run stopped",
        "20 restart from step-00000020",
        "21 loss or gradient not finite update left out",
        "30 the loss jumped let pass",
        "40 the loss jumped back to step-00000020",
        "50 restart from step-00000050",
    ]
    assert [line[4] for line in table] == ["not a number", "", "not a number", "9.000", "12.000", ""]
    assert "Faults and restarts" in page.texts("h2")


def test_a_run_that_ran_through_lists_nothing(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path, *(step(i) for i in range(1, 21))))
    assert "Faults and restarts" not in page.texts("h2") and "fault" not in page.texts("span")


def test_a_torn_line_is_told(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = page_of(run_folder(tmp_path, *records, tail='{"kind":"step","st'))
    assert page.tile("Steps") == "150"
    assert any("1 line of metrics.jsonl could not be read" in x for x in page.texts("p"))


@pytest.mark.runs
@pytest.mark.parametrize("all_broken", [False, True])
def test_a_hundred_thousand_steps_stay_a_small_page(tmp_path: Path, all_broken: bool) -> None:
    """Also when every loss is broken, which marks every step."""
    lines = [
        json.dumps(step(i, math.nan if all_broken else 99.0 if i == 54_321 else 2 + 1 / i)) for i in range(1, 100_001)
    ]
    folder = run_folder(tmp_path, tail="\n".join(lines))
    path = write_report(folder)
    assert path.stat().st_size < 2_000_000
    charts = Page(path.read_text("utf-8")).data()["charts"]
    if not all_broken:
        assert "99.000" in charts[0][0]["text"]  # the one spike survives the thinning


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path: Path, count: int) -> None:
    start = {"kind": "start", "step": 0, "tokens": 0, "time": 1.0}
    folder = run_folder(tmp_path, start, *[step(1)] * count, config=None)
    page = page_of(folder)
    assert page.tile("Steps") == str(count)
    assert "Nothing recorded yet" in page.texts("text", "tick")
    assert page.texts("pre") == ["This run has no config.yaml."]
    ET.parse(write_loss_svg(folder, tmp_path / "loss.svg"))


def test_the_page_asks_nobody_for_anything(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """A run's page is opened on machines without a network, and must not tell anyone that it was."""
    folder = run_folder(tmp_path, *records)
    text = write_report(folder).read_text("utf-8")
    page = Page(text)
    assert not [a for t, a, _ in page.found if "src" in a or (t != "link" and "href" in a)]
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", text)
    policy = next(a["content"] for t, a, _ in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'")


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    """A phase, a checkpoint or a configuration may hold anything; none of it may run."""
    evil = "</script><script>alert(1)</script>"
    back = {**resume(1), "checkpoint": evil}
    page = page_of(run_folder(tmp_path, step(1, phase=evil), back, step(2, phase=evil), config=f"name: '{evil}'\n"))
    assert len(page.texts("script")) == 2
    assert page.texts("pre") == [f"name: '{evil}'\n"]
    assert evil in page.data()["steps"]["text"][0]


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


def test_the_picture_is_whole_svg_on_a_white_card(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """A README shows it on a light and on a dark page, and gives it no style sheet."""
    out = write_loss_svg(run_folder(tmp_path, *records), tmp_path / "loss.svg")
    root = ET.parse(out).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.get("width") == "1000"
    style = root.find(f"{space}style")
    assert style is not None
    assert "--card: #ffffff" in str(style.text)
    assert set(re.findall(r"var\((--\w+)\)", str(style.text))) <= set(re.findall(r"(--\w+):", str(style.text)))
    assert [e.get("class") for e in root.findall(f"{space}rect")] == ["card"]
    texts = [e.text for e in root.iter(f"{space}text")]
    assert {"validation", "unigram baseline", "restart", "stable", "decay", "tokens seen"} <= set(texts)


def test_phase_labels_never_touch() -> None:
    """Short last phases are the usual case: three names within a tenth of the axis."""
    marks = Marks(end=100.0, boundaries=[(0, "stable"), (80, "context"), (90, "decay"), (97, "cool")])
    rows = label_rows(marks, width=300)
    assert rows[0] == 0
    assert len(set(rows[1:])) == 3


def test_axes_hold_all_values_and_round_ticks() -> None:
    def scale(values: list[float], log: bool = False, low: float | None = None) -> Scale:
        line = Line("a", "main", list(range(len(values))), values)
        return Scale(Chart("t", [line], str, str, log=log, low=low))

    linear = scale([0.0, 8e-4], low=0.0)
    assert linear.position(0.0) == 0.0
    assert linear.ticks == pytest.approx([0, 2e-4, 4e-4, 6e-4, 8e-4])
    assert scale([5.0, 5.0]).position(5.0) == pytest.approx(0.5)
    logarithmic = scale([0.01, 100.0], log=True)
    assert logarithmic.ticks == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert logarithmic.position(1.0) == pytest.approx(0.5)
    assert logarithmic.position(0.0) is None
    assert scale([7.0, 9.0], log=True).ticks == pytest.approx([7, 7.5, 8, 8.5, 9])


def test_a_chart_of_nothing_but_gaps_is_a_sentence() -> None:
    drawing = draw(Chart("t", [Line("a", "main", [1.0], [math.nan])], str, str), Marks(end=1.0))
    assert "Nothing recorded yet" in drawing.axes
    assert drawing.points == []


def test_a_value_without_neighbours_is_a_dot(tmp_path: Path) -> None:
    """The one value of a run that has just begun, or one between two gaps; a curve has no length there."""
    page = page_of(run_folder(tmp_path, step(1), *(step(i, math.nan if i != 5 else 2.0) for i in range(2, 9))))
    dots = [a for t, a, _ in page.found if t == "path" and a.get("class") == "faint lone"]
    assert dots[0]["d"] is not None and dots[0]["d"].count("h0") == 2
    style = page.texts("style")[0]
    assert re.search(r"path\.lone \{ stroke-width: 7 \}", style) and "stroke-linecap: round" in style


def test_a_long_name_of_a_phase_stays_in_its_chart(tmp_path: Path) -> None:
    name = "a-phase-with-quite-a-long-name-" * 5 + "end"
    page = page_of(run_folder(tmp_path, *(step(i, phase=name) for i in range(1, 20))))
    labels = [text for text in page.texts("text", "phase")]
    assert len(labels) == 6 and all(len(label) == 24 and label.endswith("end") for label in labels)
    assert page.texts("title").count(name) == 6


@pytest.mark.runs
def test_faults_of_every_step_stay_a_small_page(tmp_path: Path) -> None:
    """A run that skipped 20,000 updates has few marks, which say how many each stands for."""
    folder = run_folder(tmp_path, step(1), *(fault(i, "skip") for i in range(2, 20_002)), step(20_002))
    path = write_report(folder)
    assert path.stat().st_size < 300_000
    marks = [text for text in Page(path.read_text("utf-8")).texts("title") if text.startswith("step ")]
    assert 100 < len(marks) <= 500
    assert sum(3 + int(m.rpartition("and ")[2].split()[0].replace(",", "")) for m in marks) == 20_000


def test_numbers_as_a_reader_wants_them() -> None:
    assert [tokens_text(t) for t in (0, 950, 12_345, 999_900, 12_300_000, 1.72e12)] == [
        "0", "950", "12.3 k", "1000 k", "12.3 M", "1.72 T",
    ]  # fmt: skip
    assert [rate(v) for v in (8e-4, 0.0, 1.25e-5)] == ["8e-4", "0", "1.25e-5"]
    assert [percent(2)(v) for v in (0.993, 0.0, 1.0, 0.5)] == ["99.3 %", "0 %", "100 %", "50 %"]
    assert [duration(s) for s in (5, 125, 7200, 93_784, 300_000)] == ["5 s", "2 min", "2 h", "26 h 3 min", "3 d 11 h"]
