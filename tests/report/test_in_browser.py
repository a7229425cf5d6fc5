"""The page in a real browser: clicks, pointer, window width, and a run that is still training."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.report.page import write_comparison, write_report
from modernbert_train.report.serve import open_server
from tests.report.browser import Browser, browser
from tests.report.records import evaluation, fault, resume, step, validation
from tests.support.report_page import run, sample, statistics

HOSTILE = "<script>document.title='stolen'</script><img src=x onerror=alert(1)>" + "unbroken" * 20
ROWS = "return [...document.querySelectorAll('#runs tbody tr')].filter(r => !r.hidden).map(r => +r.dataset.run)"
DRAWN = "return [...new Set(charts[0].drawn.map(line => line.run.number))]"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as driven:
        yield driven


@pytest.fixture(autouse=True)
def without_a_complaint(chromium: Browser) -> Iterator[None]:
    """Check that no page ends with a script error or violates its own policy."""
    chromium.errors()
    yield
    assert chromium.errors() == []


def records(number: int) -> list[dict[str, Any]]:
    """Return records of a run; a higher number means a higher loss, odd ones were restarted, the third had a fault."""
    steps = [step(i, loss=2 + 0.5 * number + math.exp(-i / 5)) for i in range(1, 31)]
    found = [*steps[:15], *[resume(15)] * (number % 2), *steps[15:], validation(30, 2 + 0.5 * number)]
    return [*found, evaluation(30), *[fault(30, "skip")] * (number == 3)]


def compared(folder: Path, count: int) -> Path:
    folders = [run(folder / f"run-{n:03d}", *records(n), lr=f"0.{(7 * n) % count + 1:04d}") for n in range(count)]
    return write_comparison(folders, folder / "comparison.html")


def choose(chromium: Browser, selector: str, value: object) -> None:
    """Type or pick a value as a reader would."""
    chromium.run(
        "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        "for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true}))",
        selector,
        value,
    )


@pytest.mark.parametrize("count", [1, 10])
def test_the_page_never_scrolls_sideways(chromium: Browser, tmp_path: Path, count: int) -> None:
    """For a phone, half a screen and a wide one; with hostile names, long values and 30 keys that differ."""
    keys = "\n".join(f"some_section_{i}:\n  quite_a_long_key_of_it_{i}: '{{lr}}/{'long' * 60}'" for i in range(30))
    folders = [
        run(
            tmp_path / (f"{n}" if n else HOSTILE.replace("/", "")),
            *(step(i, phase="a-long-phase-<b>-" * 9 if i > 2 else "stable") for i in range(1, 5)),
            evaluation(4, HOSTILE),
            lr=f"{n}",
            config="name: {name}\n" + keys,
        )
        for n in range(count)
    ]
    for folder in folders:
        (folder / "samples.jsonl").write_text(json.dumps(sample(4, HOSTILE)) + "\n")
        (folder / "data.json").write_text(json.dumps(asdict(statistics())))
    page = write_comparison(folders, tmp_path / "c.html") if count > 1 else write_report(folders[0])
    for width in (400, 1000, 1600):
        chromium.open(page, width, 900, dark=width == 400)
        assert chromium.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
        beyond = chromium.run(
            "return [...document.querySelectorAll('.box, h1, figcaption, .tools, .bar, .uplot')]"
            ".map(e => e.getBoundingClientRect()).filter(b => b.right > innerWidth + 1 || b.left < 0).length"
        )
        assert beyond == 0
    assert chromium.run("return document.title") != "stolen"
    assert chromium.run("return document.querySelectorAll('img, main script, main b b').length") == 0


def test_runs_are_hidden_filtered_sorted_and_kept_in_front(chromium: Browser, tmp_path: Path) -> None:
    """The next run is decided by the best learning rate, not by the first in the list."""
    page = compared(tmp_path, 12)
    chromium.open(page)
    assert chromium.run(DRAWN) == list(range(12))
    chromium.to('tr[data-run="3"] input', click=True)
    assert chromium.run(DRAWN) == [n for n in range(12) if n != 3]
    assert chromium.run("return document.querySelector('#shown').textContent") == "11 of 12 shown"
    chromium.to('button[data-all="hide"]', click=True)
    assert chromium.run(DRAWN) == []
    chromium.to('button[data-all="show"]', click=True)
    assert chromium.run(DRAWN) == list(range(12))

    heads = chromium.run("return [...document.querySelectorAll('#runs thead th')].map(h => h.textContent)")
    rates = [float(f"0.{(7 * n) % 12 + 1:04d}") for n in range(12)]

    def sort(head: str) -> list[int]:
        chromium.to(f"#runs thead th:nth-child({heads.index(head) + 1}) button", click=True)
        found = chromium.run(ROWS)
        assert isinstance(found, list)
        return found

    assert [rates[n] for n in sort("optim.lr")] == sorted(rates)
    assert [rates[n] for n in sort("optim.lr")] == sorted(rates, reverse=True)
    assert sort("Validation loss") == list(range(12)) and sort("Restarts")[0] == 0

    for words, wanted in {
        "RUN-00": list(range(10)),
        "nothing of this": [],
        "optim.lr=0.0005": [n for n in range(12) if rates[n] == 5e-4],
        "restarts=1 run-00": [1, 3, 5, 7, 9],
    }.items():
        choose(chromium, "#filter", words)
        assert sorted(chromium.run(ROWS)) == wanted and sorted(chromium.run(DRAWN)) == wanted

    choose(chromium, "#filter", "")
    chromium.to('tr[data-run="4"] .name button', click=True)
    chromium.to("h1")
    alphas = "return charts[0].plot.series.slice(1).map(s => s.alpha)"
    assert chromium.run(alphas) == [1 if n == 4 else 0.15 for n in range(12)]
    assert "run-004" in chromium.run("return document.querySelector('#about h2').textContent")
    chromium.to('tr[data-run="6"] th')
    assert chromium.run(alphas) == [1 if n == 6 else 0.15 for n in range(12)]
    address = chromium.run("return location.hash")
    chromium.open_at(page, address)
    assert chromium.run("return [state.pin, state.sort.head]") == ["run-004", "Restarts"]  # a view can be shared


def test_axes_smoothing_and_zoom(chromium: Browser, tmp_path: Path) -> None:
    chromium.open(compared(tmp_path, 2))
    ends = "return [charts[0].plot.scales.x.min, charts[0].plot.scales.x.max]"
    assert chromium.run(ends) == [0, 3000]
    for axis, end in {"step": 30, "seconds": 58, "tokens": 3000}.items():
        choose(chromium, "#axis", axis)
        assert chromium.run(ends) == [0, end]
    raw = chromium.run("state.smooth = 0; redraw(); return charts[0].drawn[0].ys")
    assert raw[0] == pytest.approx(2 + math.exp(-0.2), rel=1e-4) and len(chromium.run(DRAWN)) == 2
    choose(chromium, "#smooth", 6)
    lines = chromium.run("return charts[0].drawn.map(line => [Boolean(line.faint), line.ys[29]])")
    assert [faint for faint, _ in lines] == [True, False, True, False] and lines[1][1] > raw[29]
    assert chromium.run("return charts[0].plot.scales.y.distr") == 3
    chromium.to("figure .log input", click=True)
    assert chromium.run("return [charts[0].plot.scales.y.distr, location.hash.includes('log=loss')]") == [1, True]

    chromium.run("document.querySelector('.u-over').scrollIntoView({block: 'center', behavior: 'instant'})")
    left, top, width, height = chromium.run(
        "const b = document.querySelector('.u-over').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    chromium.drag(left + width / 4, left + width / 2, top + height / 2)
    same = "charts.filter(c => c.plot).map(c => c.plot.scales.x.min).every((x, _, all) => x > 0 && x === all[0])"
    low, high = chromium.run_later(f"return {same} && state.zoom")
    assert low == pytest.approx(750, abs=20) and high == pytest.approx(1500, abs=20)
    chromium.to("#whole", click=True)
    assert chromium.run(ends) == [0, 3000] and chromium.run("return state.zoom") is None


def test_pointing_names_the_lines_with_their_values(chromium: Browser, tmp_path: Path) -> None:
    """Twenty lines cannot be distinguished by colour only."""
    chromium.open(compared(tmp_path, 20))
    chromium.run("state.smooth = 0; redraw(); charts[0].figure.scrollIntoView({block: 'end', behavior: 'instant'})")
    place = chromium.run(
        "const plot = charts[0].plot, line = charts[0].drawn[12], b = plot.over.getBoundingClientRect();"
        "return [b.left + plot.valToPos(line.xs[20], 'x'), b.top + plot.valToPos(line.ys[20], 'y')]"
    )
    chromium.point(place[0] + 3, place[1] + 30)
    chromium.point(*place)
    tip = "return [...document.querySelectorAll('.tip:not([hidden]) > div')].map(d => [d.className, d.textContent])"
    head, *named = chromium.run_later(tip)
    assert "tokens, the 10 nearest of 20 lines" in head[1] and len(named) == 10
    assert [text for css, text in named if css == "on"] == ["run-0128.015"]
    assert [text[:7] for _, text in named] == [f"run-{n:03d}" for n in range(17, 7, -1)]  # in the order of the lines
    assert chromium.run("return document.querySelector('#runs tr.on').dataset.run") == "12"


def test_csv_and_theme(chromium: Browser, tmp_path: Path) -> None:
    folders = [run(tmp_path / name, *records(0)) for name in ("plain", "=1+1")]
    chromium.open(write_comparison(folders, tmp_path / "c.html"))
    lines = chromium.run("return csv()").splitlines()
    assert lines[0].startswith("run,kind,step,tokens,seconds,loss") and len(lines) == 1 + 2 * (30 + 2 + 1)
    assert lines[1].startswith("plain,step,1,100,0,2.8187")
    assert sum(line.startswith("'=1+1,") for line in lines) == 33  # never a formula in a spreadsheet
    links = chromium.run(
        "const found = []; const click = HTMLAnchorElement.prototype.click;"
        "HTMLAnchorElement.prototype.click = function () { found.push([this.download, this.href.slice(0, 5)]) };"
        "document.querySelector('#csv').click(); HTMLAnchorElement.prototype.click = click; return found"
    )
    assert links == [["runs.csv", "blob:"]]
    colours = "return [getComputedStyle(document.body).backgroundColor, charts[0].plot.series[1].stroke()]"
    light = chromium.run(colours)
    choose(chromium, "#theme", "dark")
    dark = chromium.run(colours)
    assert light[0] != dark[0] and light[1] != dark[1]
    choose(chromium, "#theme", "auto")
    assert chromium.run(colours) == light


def test_what_the_model_fills_in_is_followed_over_validations(chromium: Browser, tmp_path: Path) -> None:
    folder = run(tmp_path / "alone", *records(0))
    lines = [sample(10, " mouse"), sample(20, " cat"), sample(30, " dog")]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chromium.open(write_report(folder))
    fill = "return [...document.querySelectorAll('.fill')].map(f => [f.className, f.textContent, f.title])"
    assert chromium.run(fill) == [["fill right", "dog", "it is: dog; guesses: dog 50 %, dog 25 %"]]
    choose(chromium, "#sample", 0)
    assert chromium.run(fill)[0][:2] == ["fill wrong", "mousedog"]
    assert "step 10, stable: 1 of 3" in chromium.run("return document.querySelector('#samples output').textContent")


def test_the_data_are_drawn(chromium: Browser, tmp_path: Path) -> None:
    """With the right size and order, and hidden together with a run that lacks the record."""
    folder = run(tmp_path / "alone", *records(0))
    (folder / "data.json").write_text(json.dumps(asdict(statistics())))
    chromium.open(write_report(folder), 1000)
    assert chromium.run("return [...document.querySelectorAll('.data h2')].map(h => h.textContent)") == [
        "Stream english", "Stream german", "Held out",
    ]  # fmt: skip
    bars = "document.querySelectorAll('.data .bins')[0].querySelectorAll('.documents')"
    high = f"return [...{bars}].map(b => b.offsetHeight)"
    first, second, *empty, last = chromium.run(high)
    assert first == last and second == 2 * first and empty == [0, 0, 0]
    share = "const t = document.querySelectorAll('.shares .track')[0]; return t.firstChild.offsetWidth / t.offsetWidth"
    assert chromium.run(share) == pytest.approx(0.75, abs=0.01)
    (folder / "data.json").unlink()
    chromium.open(write_report(folder))
    assert chromium.run("return document.querySelectorAll('.data').length") == 0
    chromium.errors()


def test_a_page_that_is_served_follows_runs_that_continue(chromium: Browser, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    one = run(runs / "a", *(step(i) for i in range(1, 11)))
    with open_server([runs], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        chromium.open_at(server.address)
        count = "return runs.map(run => run.columns.step?.length ?? 0)"
        assert chromium.run_later(f"{count.replace('return ', 'const n = ')}; return n.length && n") == [10]
        choose(chromium, "#axis", "step")
        with (one / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(each) + "\n" for each in (step(11), step(12))) + '{"kind": "step", "st')
        run(runs / HOSTILE.replace("/", ""), step(1))
        found = chromium.run_later(f"{count.replace('return ', 'const n = ')}; return n.length === 2 && n")
        assert found == [12, 1]
        assert chromium.run("return [charts[0].plot.scales.x.max, document.title]") == [12, "runs"]
        server.shutdown()
        thread.join(10)
    chromium.errors()
