"""Figures that pages quote from the program or from benchmarks/RESULTS.md; `python -m tests.docs.figures` writes them.

A row of FIGURES is a source and its places: a page, with a pattern around the figure. tests/test_docs.py compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from io import StringIO
from typing import NamedTuple

from benchmarks.hour_parts import BASE_RATE, EAGER_RATE, LARGE_RATE, Range
from benchmarks.published import FITTED
from benchmarks.race.protocol import HERE, Protocol
from benchmarks.race.table import picture_of, read_results, table_of
from modernbert_train.__main__ import main
from modernbert_train.clock import VALIDATIONS
from modernbert_train.config.load import load_run
from modernbert_train.models.build import ENCODERS
from modernbert_train.objectives import OBJECTIVES
from modernbert_train.plan.cost import Bill, bill_of
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.memory import RESERVED_BYTES, RESERVED_SHARE
from modernbert_train.plan.memory_fit import MAX_TOKENS
from modernbert_train.plan.speed import ERROR, PLANNED_TOKENS_PER_SECOND, PUBLISHED
from modernbert_train.plan.speed_settings import SLOWER as WITHOUT_FAST_SETTINGS
from modernbert_train.train.silent_faults import SLOWER, STEPS
from tests.curves.curves import read_recorded
from tests.support.bounds import MAX_MODULES
from tests.support.paths import ROOT

NUMBERS = (
    "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
    "seventeen", "eighteen",
)  # fmt: skip


def in_words(number: int) -> str:
    """Return a number from 6 on in words."""
    return NUMBERS[number - 6]


def number_of(kinds: Iterable[type]) -> str:
    """Return in words how many kinds of this package a table has; plugins of other tests may be in it too."""
    return in_words(sum(kind.__module__.startswith("modernbert_train.") for kind in kinds))


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


def group(pattern: str, text: str) -> str:
    """Return a pattern's group in a text."""
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text[:1000]}"
    return found[1]


def planned(recipe: str, pattern: str) -> Callable[[], str]:
    """Return a source: a pattern's group in the summary of a recipe's plan on 8 H100."""
    return lambda: group(pattern, plan_of(recipe).partition("\n\n")[0])


def scaling() -> str:
    """Return the scaling table of base's plan: its header, and the rows of two clusters."""
    section = plan_of(BASE).partition("Scaling of phase")[2]
    return "".join(re.findall(r"^  (?:GPUs|256|1,024) .*\n", section, re.MULTILINE))


def measured(pattern: str) -> Callable[[], str]:
    """Return a source: a pattern's group in the results of benchmarks."""
    return lambda: group(pattern, (ROOT / RESULTS).read_text(encoding="utf-8"))


def rounded(pattern: str) -> Callable[[], str]:
    """Return a source: a measured number with three decimals, halves rounded up."""
    return lambda: str(Decimal(measured(pattern)()).quantize(Decimal("0.001"), ROUND_HALF_UP))


def drill(column: int) -> Callable[[], str]:
    """Return a source: a column of the last line of the drill's table, which has four."""
    cells = [r"(\d+)" if each == column else r"\d+" for each in range(4)]
    row = r"\| \*\*all\*\*" + "".join(rf" \| \*\*{cell}\*\*" for cell in cells)
    return lambda: f"{int(measured(row)()):,}"


RACE = ROOT / "docs/better-recipe.svg"


def race_picture() -> str:
    """Return the curves of the race's committed results."""
    return picture_of(Protocol.read(HERE / "protocol.yaml"), read_results(HERE / "results.jsonl"))


def raced() -> str:
    """Return the table of the race's committed results."""
    return table_of(Protocol.read(HERE / "protocol.yaml"), read_results(HERE / "results.jsonl"))


@cache
def bill(median: int | None = None) -> Bill:
    """Return the bill of base on 8 H100, with documents of a median length; None: each fills a row."""
    words = ["data.train=absent/train", "compute.compile=true", "optim.fused=true"]
    config = load_run([ROOT / f"yamls/recipes/{BASE}.yaml"], words)
    return bill_of(make_plan(config, 8, median), "h100", {})


def planned_for() -> str:
    """Return the number of H100 whose planning is hidden: base's fastest predicted speed on each, in whole hundreds."""
    return f"{PLANNED_TOKENS_PER_SECOND / bill().tokens_per_second[1] // 100 * 100:,.0f}"


def published_errors() -> list[int]:
    """Return predicted over published speed minus 1, in percent, of the runs of the table, in its order."""
    rows = re.findall(
        r"^\| .+ k \| ([-+]\d+) % \| [^|]+ \|$", (ROOT / RESULTS).read_text(encoding="utf-8"), re.MULTILINE
    )
    return [int(each) for each in rows]


def rates(expected: Range) -> Callable[[], str]:
    """Return a source: the tokens/s that the first GPU hour expects."""
    return lambda: " to ".join(f"{each:,.0f}" for each in expected if each is not None)


def bf16_share(row: str) -> Callable[[], str]:
    """Return a source: the processor time of bf16 over fp32's, by the rates of a row of the table of bf16 on a CPU."""

    def source() -> str:
        cells = measured(rf"\| {row} \| (.+?) \| [\d.]+ x \|")().split(" | ")
        fp32, bf16 = (sum(float(each) for each in cell.replace(",", "").split()) for cell in cells)
        return f"{fp32 / bf16:.2f}"

    return source


def reading_list() -> int:
    """Return the number of files to read first."""
    return len(re.findall(r"^\d+\. `", (ROOT / DESIGN).read_text(encoding="utf-8"), re.MULTILINE))


def rooms() -> str:
    """Return the number of rooms and of files beside them, as a sentence begins."""
    package = ROOT / "modernbert_train"
    folders, files = (len([*package.glob(pattern)]) for pattern in ("*/__init__.py", "*.py"))
    return f"{in_words(folders).capitalize()} rooms and {in_words(files)} files"


BASE, README, PLAN, SPEED = "modernbert-base", "README.md", "docs/plan.md", "docs/speed.md"
RESULTS, DESIGN = "benchmarks/RESULTS.md", "docs/design.md"
HOUR, MODEL, MINILM = "docs/first-gpu-hour.md", "docs/model.md", "yamls/recipes/adapt-minilm.yaml"
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
        (README, "fused updates it is {} times as fast as transformers"),)),
    Figure("over sparse transformers", measured(r"`sparse_prediction` \|.*ours is ([\d.]+) x"), (
        (README, "eager), {} times with `sparse_prediction`"),)),
    Figure("pace of published runs", lambda: f"{PUBLISHED.device:.2f}", ((PLAN, "program took {} times that"),)),
    Figure("token of published runs", lambda: f"{1e6 * PUBLISHED.token:.2f}", ((PLAN, "and\n{} us a token more"),)),
    Figure("error of the fit", lambda: f"{100 * (ERROR - 1):.0f} %", ((PLAN, "the upper bound adds {}, the"),)),
    Figure("fitted runs", lambda: in_words(len(FITTED)).capitalize(), (
        (PLAN, "in isolation. {} runs of ModernBERT's"),)),
    Figure("error of published runs", lambda: f"{max(map(abs, published_errors()[: len(FITTED)]))} %", (
        (PLAN, "The range meets them within {} (table in"),)),
    Figure("time of mmBERT-base", lambda: f"{1 + published_errors()[len(FITTED) + 1] / 100:.1f}", (
        (PLAN, "mmBERT-base took {} times as long"),)),
    Figure("short documents", lambda: f"{bill().seconds / bill(600).seconds - 1:.0%}".replace("%", " %"), (
        (PLAN, "makes base on 8 H100 {} faster"),)),
    Figure("without the fast settings", lambda: str(WITHOUT_FAST_SETTINGS), (
        (PLAN, "`optim.fused` it takes {} times as long"), (SPEED, "that the run takes about {} times as long"))),
    Figure("compiled base of the first hour", rates(BASE_RATE), ((HOUR, "| {} tokens/s compiled"),)),
    Figure("eager base of the first hour", rates(EAGER_RATE), ((HOUR, "tokens/s compiled, {} eager"),)),
    Figure("large of the first hour", rates(LARGE_RATE), ((HOUR, "and its memory | {} tokens/s; 70"),)),
    Figure("usable share", lambda: f"{1 - RESERVED_SHARE:.0%}".replace("%", " %"), ((PLAN, "A GPU offers {} of its"),)),
    Figure("reserved bytes", lambda: f"{RESERVED_BYTES / 1e9:g} GB", ((PLAN, "of its memory less {} (CUDA"),)),
    Figure("largest microbatch", lambda: f"{MAX_TOKENS:,}", ((PLAN, "within that, at\nmost {} tokens"),)),
    Figure("products", measured(r"products are then (\d+ %)"), ((SPEED, "base at 1,024: {} matrix products"),)),
    Figure("elementwise work", measured(r"elementwise work of the layers (\d+ %)"), (
        (SPEED, "products, {}\nelementwise work"),)),
    Figure("attention", measured(r"elementwise work of the layers \d+ %, attention (\d+ %)"), (
        (SPEED, "elementwise work, {} attention"),)),
    Figure("bf16 of the quickstart", bf16_share("quickstart's size: ours"), (
        (SPEED, "`embed --precision`) takes {} of fp32's processor time"),)),
    Figure("bf16 of base", bf16_share("ModernBERT-base: ours"), ((SPEED, "size and {} at base's"),)),
    Figure("validations", lambda: str(VALIDATIONS), (("docs/watching.md", "and at its end: {} times, or fewer"),)),
    Figure("slow rank", lambda: f"{SLOWER:g}", (("docs/faults.md", "A rank above {} times the median"),)),
    Figure("slow steps", lambda: str(STEPS), (("docs/faults.md", "times the median for {} steps"),)),
    Figure("recorded curves", lambda: str(len(read_recorded())), (
        ("docs/contributing.md", "`tests/curves/recorded.txt` has {} small runs"),)),
    Figure("files to read", lambda: in_words(reading_list()), (
        ("AGENTS.md", "a picture of a run, {} files in order"),)),
    Figure("Files to read", lambda: in_words(reading_list()).capitalize(), (
        (DESIGN, "## Read these first\n\n{} files, at"),)),
    Figure("rooms", rooms, ((DESIGN, "## Where things are\n\n{}, from the ground"),)),
    Figure("modules with the whole run", lambda: in_words(MAX_MODULES), (
        (DESIGN, "only its sections; {} modules see"),)),
    Figure("ranks that plan", planned_for, (
        ("docs/decisions/same-planner-on-every-rank.md", "for base up to about {} H100"),)),
    Figure("planned tokens", lambda: f"{PLANNED_TOKENS_PER_SECOND / 1e6:.0f} M", (
        ("docs/decisions/same-planner-on-every-rank.md", "H100 ({} tokens a second"),)),
    Figure("faults injected", drill(0), ((README, "Of {} faults injected"),)),
    Figure("faults survived", drill(1), ((README, "RESULTS.md#drill) {} were survived"),)),
    Figure("faults refused", drill(2), ((README, "were survived, {} refused clearly"),)),
    Figure("faults lost", drill(3), ((README, "refused clearly, and {} lost"),)),
    Figure("plan of pretrain", measured(r"```text\n(  text[^`]+)```"), (
        (README, "asks, and trains:\n\n```text\n{}```\n\nThe result"),
        ("docs/tasks/laptop.md", "draws the report.\n\n```text\n{}```\n\n**How long.**"))),
    Figure("end of the quickstart", measured(r"```text\n(Done\.\n[^`]+)```"), (
        (README, "The end of its output:\n\n```text\n{}```\n\n## Your own text"),)),
    Figure("retrieval before", rounded(r"docs_search nDCG@10 ([\d.]+) and"), (
        (README, "nDCG@10 from {} to"), (MODEL, "8,762 sections | {} ("))),
    Figure("retrieval after", rounded(r"both draws: docs_search nDCG@10 ([\d.]+) "), (
        (README, "nDCG@10 from 0.441 to {} in"), (MODEL, "0.441 (0.842) | **{}**"))),
    Figure("minutes of retrieval", measured(r"2,001,249 tokens, (\d+) minutes"), (
        (README, "to 0.551 in {} minutes of a CPU core"), (MODEL, "public documentation in {} minutes"),
        (MINILM, "own documents in {} minutes"))),
    Figure("steps of retrieval", measured(r"fp32: (\d+) steps, 13,888 pairs"), ((MINILM, "CPU core: {} steps with"),)),
    Figure("pairs of retrieval", measured(r"fp32: \d+ steps, ([\d,]+) pairs"), (
        (MODEL, "trained on {} pairs"), (MINILM, "steps with\n# {} pairs"))),
    Figure("quiet minutes of retrieval", measured(r"670 tokens/s: (\d+) minutes"), (
        (MINILM, "(a quiet core: {} minutes)"),)),
    Figure("a retriever from nothing", measured(r"(\| model \| documentation(?:.*\n)+?\| BM25 .*\n)"), (
        (MODEL, "seeds. It has a vector for each token (`yamls/retrieval/own.yaml`).\n\n{}\nIt finds more"),)),
    Figure("tokens of the speedrun", measured(r"one thread beside the tests: ([\d,]+) tokens"), (
        ("docs/speedrun.md", "4.1173 | {} | 381"),)),
    Figure("loss of the speedrun", measured(r"held-out loss ([\d.]+) over the whole held-out text"), (
        ("docs/speedrun.md", "without the embedding | {} | 2,500,562"),)),
    Figure("seconds of the speedrun", measured(r"tokens\), (\d+) CPU seconds for `train`"), (
        ("docs/speedrun.md", "| 2,500,562 | {} | 0 |"),)),
    Figure("race", raced, (("docs/better-recipe.md", "standard errors.\n\n{}\n![Held-out"),)),
    Figure("encoders", lambda: number_of(ENCODERS), (
        ("docs/alternatives.md", "early errors; {} families of encoders"), (README, "objectives for {} families"))),
    Figure("objectives", lambda: number_of(OBJECTIVES), (
        ("docs/alternatives.md", "encoders and {} objectives"), (README, "[{} objectives for"))),
)  # fmt: skip


def pattern_of(place: str) -> re.Pattern[str]:
    """Return the pattern of a place, with a group for the figure."""
    before, after = (re.escape(part) for part in place.split("{}"))
    figure = r"[\s\S]+?" if place.partition("{}")[0].endswith("\n\n") else "[^|]+?"  # a table, or a cell at most
    return re.compile(f"(?<={before})({figure})(?={after})" if after else f"(?<={before})(.+)")


def write() -> None:
    """Write every figure into its places."""
    for figure in FIGURES:
        for page, place in figure.places:
            text = (ROOT / page).read_text(encoding="utf-8")
            changed, count = pattern_of(place).subn(figure.source().replace("\\", r"\\"), text, count=1)
            assert count == 1, f"{page} has no {place!r}, see {figure.name} in tests/docs/figures.py"
            (ROOT / page).write_text(changed, encoding="utf-8")
    RACE.write_text(race_picture(), encoding="utf-8")


if __name__ == "__main__":
    write()
