"""Runs that share a chart must be told apart by everyone, whatever colours they see."""

from __future__ import annotations

import itertools
import re

import pytest

from modernbert_train.report.page import resource
from tests.report.colours import VISIONS, ciede2000, contrast, difference

APART = 12.0  # CIEDE2000
COLOURS = 7


def palette(dark: bool) -> dict[str, str]:
    """Colours of a page by the names of their variables."""
    sheets = resource("page.css")
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


def test_neighbours_differ_in_dashes_too() -> None:
    """Dashes and colours come from lists whose lengths have no common divisor: any 28 runs differ."""
    script = resource("page.js")
    found = re.search(r"const COLOURS = (\d+), DASHES = \[(.*)\];", script)
    assert found is not None and int(found[1]) == COLOURS
    dashes = re.findall(r"\[[\d, ]*\]", found[2])
    assert len(set(dashes)) == len(dashes) == 4
