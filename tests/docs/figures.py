"""Figures that pages quote from the program or from benchmarks/RESULTS.md; `python -m tests.docs.figures` writes them.

A row of FIGURES is a source and its places: a page, with a pattern around the figure. tests/test_docs.py compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import NamedTuple

from modernbert_train.__main__ import main
from modernbert_train.models.build import ENCODERS
from modernbert_train.objectives import OBJECTIVES
from modernbert_train.plan.speed import ERROR, PLANNED_TOKENS_PER_SECOND, PUBLISHED
from tests.support.paths import ROOT

NUMBERS = ("six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen")  # from 6


def number_of(kinds: Iterable[type]) -> str:
    """Return in words how many kinds of this package a table has; plugins of other tests may be in it too."""
    return NUMBERS[sum(kind.__module__.startswith("modernbert_train.") for kind in kinds) - 6]


class Figure(NamedTuple):
    """A figure with its source, and every place that quotes it: (page, text with {} where the figure is)."""

    name: str
    source: Callable[[], str]
    places: tuple[tuple[str, str], ...]


@cache
def plan_of(recipe: str) -> str:
    """Run `modernbert-train plan` for a recipe on 8 H100 and return its output."""
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["plan", str(ROOT / f"yamls/recipes/{recipe}.yaml"), "--ranks", "8", "--gpu", "h100"]) == 0
    return printed.getvalue()


def planned(recipe: str, pattern: str) -> Callable[[], str]:
    """Return a source: a pattern's group in the summary of a recipe's plan on 8 H100."""

    def source() -> str:
        text = plan_of(recipe).partition("\n\n")[0]
        found = re.search(pattern, text)
        assert found, f"{pattern} is not in the plan of {recipe}:\n{text}"
        return found[1]

    return source


def scaling() -> str:
    """Return the scaling table of base's plan: its header, and the rows of two clusters."""
    section = plan_of(BASE).partition("Scaling of phase")[2]
    return "".join(re.findall(r"^  (?:GPUs|256|1,024) .*\n", section, re.MULTILINE))


def measured(pattern: str, page: str = "benchmarks/RESULTS.md") -> Callable[[], str]:
    """Return a source: a pattern's group in a page."""

    def source() -> str:
        found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
        assert found, f"{pattern} is not in {page}"
        return found[1]

    return source


def drill(column: int) -> Callable[[], str]:
    """Return a source: a column of the last line of the drill's table, which has four."""
    cells = [r"(\d+)" if each == column else r"\d+" for each in range(4)]
    row = r"\| \*\*all\*\*" + "".join(rf" \| \*\*{cell}\*\*" for cell in cells)
    return lambda: f"{int(measured(row)()):,}"


BASE, README, PLAN = "modernbert-base", "README.md", "docs/plan.md"
FIGURES = (
    Figure("days of base", planned(BASE, r"takes +(.+?) d, predicted"), (
        (README, "published takes {} days on 8 H100"), (README, "  takes     {} d, predicted"))),
    Figure("dollars of base", planned(BASE, r"and (.+?) dollars at"), (
        (README, "days on 8 H100 and {} dollars"), (README, "d, predicted, and {} dollars at"))),
    Figure("memory of base", planned(BASE, r"memory +(.+)"), ((README, "  memory    {}\n"),)),
    Figure("steps of base", planned(BASE, r"training +(.+)"), ((README, "149,655,232 parameters\n  training  {}\n"),)),
    Figure("scaling of base", scaling, ((PLAN, "over the whole step:\n\n```text\n{}```"),)),
    Figure("minutes of continue", planned("continue", r"takes +(.+?) min"), (
        ("docs/continue.md", "predicts {} minutes on 8 H100"),)),
    Figure("dollars of continue", planned("continue", r"and (.+?) dollars at"), (
        ("docs/continue.md", "minutes on 8 H100, {} dollars"),)),
    Figure("minutes of 32 k", planned("context-32k", r"takes +(.+?) min"), (
        ("docs/tasks/long.md", "predicts {} minutes on 8\nH100 and"),)),
    Figure("memory of 32 k", planned("context-32k", r"spare: ([\d.]+) of"), (
        ("docs/tasks/long.md", "H100 and {} GB on each"),)),
    Figure("speed on an H200", measured(r"\*\*([\d,]+) tokens/s\*\*"), (
        (README, "[{} tokens/s](benchmarks/RESULTS.md#on-a-gpu)"),
        ("docs/speed.md", "trained base by its recipe at {} tokens/s"))),
    Figure("over transformers", measured(r"padded, sdpa, eager \|.*ours is ([\d.]+) x"), (
        (README, "on one H200, {} times transformers"),)),
    Figure("over sparse transformers", measured(r"`sparse_prediction` \|.*ours is ([\d.]+) x"), (
        (README, "eager), {} times with `sparse_prediction`"),)),
    Figure("pace of published runs", lambda: f"{PUBLISHED.device:.2f}", ((PLAN, "program took {} times that"),)),
    Figure("token of published runs", lambda: f"{1e6 * PUBLISHED.token:.2f}", ((PLAN, "and\n{} us a token more"),)),
    Figure("error of the fit", lambda: f"{100 * (ERROR - 1):.0f} %", ((PLAN, "the upper bound adds {}, the"),)),
    Figure("planned tokens", lambda: f"{PLANNED_TOKENS_PER_SECOND / 1e6:.0f} M", (
        ("docs/decisions/same-planner-on-every-rank.md", "2,600 H100 ({} tokens a second"),)),
    Figure("faults injected", drill(0), ((README, "Of {} faults injected"),)),
    Figure("faults survived", drill(1), ((README, "RESULTS.md#drill) {} were survived"),)),
    Figure("faults refused", drill(2), ((README, "were survived, {} refused clearly"),)),
    Figure("plan of pretrain", measured(r"```text\n(  text[^`]+)```", "docs/tasks/laptop.md"), (
        (README, "asks, and trains:\n\n```text\n{}```\n\nThe result"),)),
    Figure("end of the quickstart", measured(r"```text\n(Done\.\n[^`]+)```"), (
        (README, "The end of its output:\n\n```text\n{}```\n\n## Your own text"),)),
    Figure("retrieval before", measured(r"sections \| ([\d.]+) ", "docs/model.md"), ((README, "nDCG@10 from {} to"),)),
    Figure("retrieval after", measured(r"sections \| \S+ \S+ \| \*\*([\d.]+)", "docs/model.md"), (
        (README, "nDCG@10 from 0.441 to {} in"),)),
    Figure("minutes of retrieval", measured(r"documentation in (\d+) minutes", "docs/model.md"), (
        (README, "to 0.556 in {} minutes of a CPU core"),)),
    Figure("tokens of the speedrun", measured(r"one thread beside the tests: ([\d,]+) tokens"), (
        ("docs/speedrun.md", "4.1173 | {} | 381"),)),
    Figure("loss of the speedrun", measured(r"held-out loss ([\d.]+) over the whole held-out text"), (
        ("docs/speedrun.md", "without the embedding | {} | 2,500,562"),)),
    Figure("seconds of the speedrun", measured(r"tokens\), (\d+) CPU seconds for `train`"), (
        ("docs/speedrun.md", "| 2,500,562 | {} | 0 |"),)),
    Figure("encoders", lambda: number_of(ENCODERS), (
        ("docs/alternatives.md", "early errors; {} families of encoders"), (README, "objectives for {} families"))),
    Figure("objectives", lambda: number_of(OBJECTIVES), (
        ("docs/alternatives.md", "encoders and {} objectives"), (README, "[{} objectives for"))),
)  # fmt: skip


def pattern_of(place: str) -> re.Pattern[str]:
    """Return the pattern of a place, with a group for the figure."""
    before, after = (re.escape(part) for part in place.split("{}"))
    return re.compile(f"(?<={before})([^|]+?)(?={after})" if after else f"(?<={before})(.+)")


def write() -> None:
    """Write every figure into its places."""
    for figure in FIGURES:
        for page, place in figure.places:
            text = (ROOT / page).read_text(encoding="utf-8")
            changed, count = pattern_of(place).subn(figure.source().replace("\\", r"\\"), text, count=1)
            assert count == 1, f"{page} has no {place!r}, see {figure.name} in tests/docs/figures.py"
            (ROOT / page).write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    write()
