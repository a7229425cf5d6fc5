"""Runs that share a chart must be told apart by everyone, in colour and without it."""

from __future__ import annotations

import itertools
import re

import pytest

from modernbert_train.report.page import resource
from modernbert_train.report.series import COLOURS, DASHES, SHAPES, key, look, markers
from tests.report.colours import VISIONS, ciede2000, contrast, difference

APART = 12.0  # CIEDE2000


def palette(dark: bool) -> dict[str, str]:
    """Colours of a page by the names of their variables."""
    sheets = resource("chart.css") + resource("page.css") + resource("compare.css")
    light_rules = re.sub(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}", "", sheets, flags=re.S)
    return dict(re.findall(r"(--\w+): (#[0-9a-f]{6})", sheets if dark else light_rules))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("vision", VISIONS)
def test_any_two_runs_colours_are_far_apart_to_every_colour_vision(vision: str, dark: bool) -> None:
    """One man in twelve sees red and green, or blue and purple, as one."""
    colours = palette(dark)
    runs = [colours[f"--r{i}"] for i in range(COLOURS)]
    near = {(a, b): difference(a, b, vision) for a, b in itertools.combinations(runs, 2)}
    assert min(near.values()) >= APART, near
    alone = [colours[name] for name in ("--main", "--dots", "--base")]  # of the page of one run
    assert min(difference(a, b, vision) for a, b in itertools.combinations(alone, 2)) >= APART


@pytest.mark.parametrize("dark", [False, True])
def test_every_colour_stands_out_from_the_card(dark: bool) -> None:
    """3 is what the accessibility guidelines ask of the parts of a chart."""
    colours = palette(dark)
    assert min(contrast(colours[f"--r{i}"], colours["--card"]) for i in range(COLOURS)) >= 3


def test_the_measure_sees_what_a_deuteranope_does_not() -> None:
    """Pairs of the paper's own table; and a blue and a purple that stood side by side in this chart once."""
    assert ciede2000((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert ciede2000((50.0, 2.5, 0.0), (58.0, 24.0, 15.0)) == pytest.approx(19.4535, abs=1e-4)
    assert ciede2000((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514)) == pytest.approx(0.9082, abs=1e-4)
    assert difference("#2563c9", "#9333b8", "common") > APART
    assert difference("#2563c9", "#9333b8", "deuteranopia") < 3


def test_runs_differ_without_their_colours() -> None:
    """On a printout, say: dashes and markers differ within any 28, dashes between any two neighbours."""
    looks = [look(run) for run in range(200)]
    assert len(set(looks[: 7 * DASHES * len(SHAPES)])) == 196
    for first in range(150):
        assert len({each[1:] for each in looks[first : first + 28]}) == 28
        assert looks[first].dash != looks[first + 1].dash and looks[first].colour != looks[first + 1].colour
    assert [each.dash for each in looks[:4]] == [0, 1, 2, 3]
    css = resource("compare.css")
    assert len({re.search(rf"path\.d{i} {{ stroke-dasharray: ([\d. ]+) }}", css)[1] for i in range(1, DASHES)}) == 3  # type: ignore[index]


def test_markers_lie_on_points_of_their_line_and_not_in_gaps() -> None:
    x, y = list(range(0, 1000, 10)), [None if i == 50 else i for i in range(100)]
    for run in range(4, 100):
        found = markers(run, x, y)
        assert all((at, height) in zip(x, y, strict=True) and height is not None for at, height in found)
        assert bool(found) == bool(look(run).shape)
    assert markers(5, x, y) != markers(33, x, y)  # a run of the same dashes and marker has it elsewhere
    assert markers(5, [7], [3]) == [(7, 3)] and markers(5, [7], [None]) == [] and markers(None, x, y) == []


def test_a_key_shows_the_line_as_it_is_drawn() -> None:
    assert 'class="main run r6 d2"' in key(6, "a") and 'href="#shape1"' in key(6, "a")
    assert "href" not in key(2, "a") and "&lt;b&gt;" in key(2, "<b>")
