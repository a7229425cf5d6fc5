"""Still pictures: a plan, a sweep, figures of the docs."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from modernbert_train.report.chart import Chart, Event, Line, Marks, Scale, draw, label_rows, standalone, thin
from modernbert_train.report.page import resource
from modernbert_train.text import duration, fixed, percent, rate, short, tokens_text


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


def test_the_picture_is_whole_svg_on_a_white_card() -> None:
    """A README shows it on a light and on a dark page, and gives it no style sheet."""
    lines = [Line("loss", "main", [1.0, 2.0, 3.0], [3.0, math.nan, 2.0]), Line("checks", "points", [2.0], [2.5])]
    marks = Marks(end=3.0, boundaries=[(0, "stable")], restarts=[Event(1.0, "restart")], faults=[Event(2.0, "fault")])
    text = standalone(Chart("Loss <&>", lines, fixed(3), short, log=True), marks, "a run", resource("chart.css"))
    root = ET.fromstring(text)
    assert root.get("width") == "1000"
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss <&>", "loss", "checks", "restart", "stable", "tokens seen"} <= set(texts)
    assert text.count("h0") >= 2  # a value without neighbours is a dot


def test_thinning_keeps_both_extremes() -> None:
    values = [math.sin(i) for i in range(5000)]
    values[2500] = 9.0
    assert 2500 in thin(range(5000), values, 50) and len(thin(range(5000), values, 50)) <= 102


def test_numbers_as_a_reader_wants_them() -> None:
    assert [tokens_text(t) for t in (0, 950, 12_345, 999_900, 12_300_000, 1.72e12)] == [
        "0", "950", "12.3 k", "1000 k", "12.3 M", "1.72 T",
    ]  # fmt: skip
    assert [rate(v) for v in (8e-4, 0.0, 1.25e-5)] == ["8e-4", "0", "1.25e-5"]
    assert [percent(2)(v) for v in (0.993, 0.0, 1.0, 0.5)] == ["99.3 %", "0 %", "100 %", "50 %"]
    assert [duration(s) for s in (5, 125, 7200, 93_784, 300_000)] == ["5 s", "2 min", "2 h", "26 h 3 min", "3 d 11 h"]
