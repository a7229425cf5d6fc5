"""Pages of runs in a real browser: what a click, the pointer and the width of the window do to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.report import write_comparison, write_report
from tests.report.browser import Browser, browser
from tests.report.records import fault, resume, step, validation
from tests.report.test_compare import run

HOSTILE = "<script>document.title='stolen'</script><img src=x onerror=alert(1)>" + "unbroken" * 20
SHOWN = (
    "return [...document.querySelectorAll('figure:first-child .curves path.run:not(.off)')].map(p => +p.dataset.run)"
)
ROWS = "return [...document.querySelectorAll('#runs tbody tr')].filter(r => !r.hidden).map(r => +r.dataset.run)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as driven:
        yield driven


@pytest.fixture(autouse=True)
def without_a_complaint(chromium: Browser) -> Iterator[None]:
    """No page may end in an error of its script, or ask anyone for anything (its policy would complain)."""
    chromium.errors()
    yield
    assert chromium.errors() == []
    assert chromium.run("return performance.getEntriesByType('resource').length") == 0


def records(number: int) -> list[dict[str, Any]]:
    """Of a run whose loss is the higher, the higher its number; odd ones were restarted, the third had a fault."""
    steps = [step(i, loss=2 + 0.5 * number + math.exp(-i / 5)) for i in range(1, 31)]
    found = [*steps[:15], *[resume(15)] * (number % 2), *steps[15:], validation(30, 2 + 0.5 * number)]
    return [*found, *[fault(30, "skip")] * (number == 3)]


def compared(folder: Path, count: int) -> Path:
    folders = [run(folder / f"run-{n:03d}", *records(n), lr=f"0.{(7 * n) % count + 1:04d}") for n in range(count)]
    return write_comparison(folders, folder / "comparison.html")


@pytest.mark.runs
@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_the_page_never_scrolls_sideways(chromium: Browser, tmp_path: Path, count: int) -> None:
    """On a phone, half a screen and a wide one; with hostile names, long values and 30 keys that differ."""
    keys = "\n".join(
        f"some_section_{i}:\n  quite_a_long_key_of_it_{i}: '{{lr}}/{'long' * 60}'"
        for i in range(30 if count < 100 else 6)
    )
    config = "name: {name}\n" + keys
    phase = "a-long-phase-" * 9
    folders = [
        run(
            tmp_path / (f"{n}" if n else HOSTILE.replace("/", "")),
            *(step(i, phase=phase if i > 2 else "stable") for i in range(1, 5)),
            lr=f"{n}",
            config=config,
        )
        for n in range(count)
    ]
    page = write_comparison(folders, tmp_path / "c.html") if count > 1 else write_report(folders[0])
    for width in (400, 1000, 1600):
        chromium.open(page, width, 900)
        assert chromium.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
        beyond = chromium.run(
            "return [...document.querySelectorAll('.box, h1, figcaption, .tools')].map(e => e.getBoundingClientRect())"
            ".filter(b => b.right > innerWidth + 1 || b.left < 0).length"
        )
        assert beyond == 0
    assert chromium.run("return document.title") != "stolen"
    assert chromium.run("return document.querySelectorAll('img').length") == 0


def test_a_click_on_a_run_hides_and_shows_it_in_all_charts(chromium: Browser, tmp_path: Path) -> None:
    """Also what else is drawn of it: marks of restarts and faults, markers, lone values."""
    chromium.open(compared(tmp_path, 8))
    drawn = (
        "return [...document.querySelectorAll('.curves [data-run=\"%d\"]')]"
        ".filter(p => getComputedStyle(p).display !== 'none').length"
    )
    before = [chromium.run(drawn % n) for n in range(8)]
    assert before[3] >= 13 and before[5] >= 12  # six charts: a curve (validation: a dot) and a restart in each, a fault
    chromium.to('tr[data-run="3"] button', click=True)
    assert [chromium.run(drawn % n) for n in range(8)] == [*before[:3], 0, *before[4:]]
    assert chromium.run("return document.querySelectorAll('.over .hot path').length") == 0  # though pointed at
    pressed = "return document.querySelector('tr[data-run=\"3\"] button').getAttribute('aria-pressed')"
    assert chromium.run(pressed) == "false" and len(chromium.run(ROWS)) == 8
    assert chromium.run("return document.querySelector('.tools output').textContent") == "7 of 8 shown"
    chromium.to('tr[data-run="3"] button', click=True)
    assert [chromium.run(drawn % n) for n in range(8)] == before and chromium.run(pressed) == "true"
    chromium.to('button[data-all="hide"]', click=True)
    assert chromium.run(SHOWN) == []
    chromium.to('tr[data-run="6"] button', click=True)
    assert chromium.run(SHOWN) == [6]
    chromium.to('button[data-all="show"]', click=True)
    assert chromium.run(SHOWN) == list(range(8))


def test_the_table_sorts_by_any_column_and_filters_by_names_and_keys(chromium: Browser, tmp_path: Path) -> None:
    """The next run is decided by which of the rates won, and not by which stands first."""
    chromium.open(compared(tmp_path, 12))
    heads = chromium.run("return [...document.querySelectorAll('#runs thead th')].map(h => h.textContent)")
    rates = [float(f"0.{(7 * n) % 12 + 1:04d}") for n in range(12)]

    def sort(head: str) -> list[int]:
        chromium.to(f"#runs thead th:nth-child({heads.index(head) + 1}) button", click=True)
        found = chromium.run(ROWS)
        assert isinstance(found, list)
        return found

    assert [rates[n] for n in sort("optim.lr")] == sorted(rates)
    assert [rates[n] for n in sort("optim.lr")] == sorted(rates, reverse=True)
    assert sort("Validation loss") == list(range(12)) and sort("Validation loss") == list(range(11, -1, -1))
    assert sort("Run") == list(range(12))
    assert sort("Restarts") == [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]

    def filtered(words: str) -> list[int]:
        chromium.run(
            "const f = document.querySelector('.tools input'); f.value = arguments[0];"
            "f.dispatchEvent(new Event('input'))",
            words,
        )
        shown = chromium.run(SHOWN)
        assert sorted(chromium.run(ROWS)) == sorted(shown)
        return sorted(shown)

    assert filtered("RUN-00") == list(range(10)) and filtered("nothing of this") == []
    assert filtered("optim.lr=0.0005") == [n for n in range(12) if rates[n] == 5e-4] != []
    assert filtered("restarts=1 run-00") == [1, 3, 5, 7, 9]
    assert filtered("") == list(range(12))


def test_a_few_runs_are_filtered_by_the_keys_of_the_other_table(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(compared(tmp_path, 3))
    chromium.run(
        "const f = document.querySelector('.tools input'); f.value = 'lr=0.0002'; f.dispatchEvent(new Event('input'))"
    )
    assert chromium.run(ROWS) == [1]


def test_pointing_at_a_run_highlights_it_in_all_charts_with_its_name_and_value(
    chromium: Browser, tmp_path: Path
) -> None:
    """Colour alone does not say which of ten lines is which."""
    chromium.open(compared(tmp_path, 10))
    over = "return [...document.querySelectorAll('.over .hot')].map(g => g.querySelector('path')?.dataset.run)"
    labels = "return [...document.querySelectorAll('.label')].map(l => l.textContent)"
    assert chromium.run(over) == [None] * 6
    chromium.to('tr[data-run="4"] th')
    assert chromium.run(over) == ["4"] * 6
    assert chromium.run(labels)[:2] == ["run-004 4.004", "run-004 4.000"]
    assert chromium.run("return getComputedStyle(document.querySelector('.curves')).opacity") == "0.16"
    chromium.to("h1")
    assert chromium.run(over) == [None] * 6 and chromium.run(labels) == [""] * 6


def test_pointing_at_a_line_names_it_and_the_lines_around_it(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(compared(tmp_path, 20))
    chromium.run("document.querySelector('figure').scrollIntoView({block: 'end'})")
    place = chromium.run(
        "const line = figures[0].lines[12], b = document.querySelector('.plot').getBoundingClientRect();"
        "return [b.left + b.width * line.x[20] / 1e4, b.top + b.height * line.y[20] / 1e4]"
    )
    chromium.point(*place)
    tip = "return [...document.querySelectorAll('.tip:not([hidden]) div')].map(d => [d.className, d.textContent])"
    head, *named = chromium.run(tip)
    assert head[1] == "2.1 k tokens, the 10 nearest of 20 runs"
    assert len(named) == 10 and [text for css, text in named if css == "on"] == ["run-0128.017"]
    assert [text[:7] for _, text in named] == [f"run-{n:03d}" for n in range(17, 7, -1)]  # as they lie
    assert chromium.run("return document.querySelector('#runs tr.on').dataset.run") == "12"
    assert chromium.run("return document.querySelectorAll('.label')[2].textContent") == "run-012 1.2"
    chromium.to('button[data-all="hide"]', click=True)
    chromium.run("document.querySelector('figure').scrollIntoView({block: 'end'})")
    chromium.point(*place)
    assert chromium.run(tip) == []  # what is hidden is not named


def test_a_lone_value_can_be_seen(chromium: Browser, tmp_path: Path) -> None:
    """One validation of each run, as after the first hour of a sweep."""
    chromium.open(compared(tmp_path, 5))
    chromium.run("document.querySelectorAll('figure')[1].scrollIntoView({block: 'center'})")
    dots = chromium.run(
        "return [...document.querySelectorAll('figure:nth-child(2) path.lone')].map(p => {"
        "const s = getComputedStyle(p);"
        "return [parseFloat(s.strokeWidth), s.strokeLinecap, s.strokeDasharray, s.vectorEffect]})"
    )
    assert dots == [[7, "round", "none", "non-scaling-stroke"]] * 5


def test_the_page_of_one_run_follows_the_pointer(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(write_report(run(tmp_path / "alone", *records(0))))
    chromium.to("figure:first-child .plot")
    assert chromium.run("return document.querySelector('.where').textContent").startswith("step 15 · 1.5 k tokens")
    assert chromium.run("return document.querySelector('.keys b').textContent") == "2.050"
    assert chromium.run("return document.querySelector('.dot').style.visibility") == "visible"
