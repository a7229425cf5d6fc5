"""Results of a tune: a table as Markdown and JSON, and the settings that runs take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.text import markdown_table
from modernbert_train.errors import StorageError
from modernbert_train.plan.tuned import SETTINGS, Tuned

TABLE, MARKDOWN = "table.json", "table.md"


@dataclass
class Row:
    """A candidate, or what was not tried.

    Attributes:
        question: it belongs to.
        settings: what it changes, as one would write it.
        outcome: taken, slower, left out, wrong, does not fit, failed.
        text: why; what parity said.
        tokens_per_second: median over its steps.
        ratio: of that to what there was before.
        steps: that were timed.
        first_seconds: of its first step, which compiles and is not counted.
    """

    question: str
    settings: str
    outcome: str
    text: str = ""
    tokens_per_second: float | None = None
    ratio: float | None = None
    steps: int = 0
    first_seconds: float | None = None


@dataclass(frozen=True)
class Report:
    """All that a tune has to say.

    Attributes:
        title: what was tuned, where.
        rows: in the order in which they were tried.
        pair: tokens a second of each turn of the last comparison, of today's settings and of those found.
        gain: of the pair; 1 where both are the same.
        advice: lines for the user.
    """

    title: str
    rows: Sequence[Row]
    pair: tuple[Sequence[float], Sequence[float]]
    gain: float
    advice: Sequence[str]

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Of today's settings and of those found, over the turns of the last comparison; the same where today's stay,
        and 1 where no turn was taken."""
        before = median(self.pair[0]) if self.pair[0] else 1.0
        return before, max(1.0, self.gain) * before


def as_markdown(report: Report) -> str:
    """The table, and the last comparison."""
    head = ("question", "settings", "outcome", "tokens/s", "x before", "first step, s", "steps", "")
    rows = [
        (
            row.question,
            f"`{row.settings}`",
            row.outcome,
            "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.first_seconds is None else f"{row.first_seconds:.1f}",
            f"{row.steps}" if row.steps else "",
            row.text.replace("|", "/"),
        )
        for row in report.rows
    ]
    before, after = ([f"{rate:,.0f}" for rate in rates] for rates in report.pair)
    last = [
        "",
        f"In turns at the end, tokens/s: today's settings {', '.join(before)}; those found {', '.join(after)}: "
        f"{report.gain:.2f} x, the median over turns.",
    ]
    return "\n".join(
        [
            report.title,
            "",
            markdown_table(head, rows),
            *(last if before else []),
            *(f"\n{text}" for text in report.advice),
        ]
    )


def write_findings(folder: Path, report: Report, tuned: Tuned) -> None:
    """Write all of it, the settings last.

    Raises:
        StorageError: the disk refuses it.
    """
    as_json: dict[str, Any] = asdict(report) | {"settings": dict(tuned.settings), "date": tuned.date}
    with os_errors_as(StorageError, f"{folder}: cannot be written", "Free some space; the same command resumes."):
        write_whole(folder / MARKDOWN, as_markdown(report) + "\n")
        write_whole(folder / TABLE, json.dumps(as_json, indent=2) + "\n")
        write_whole(folder / SETTINGS, tuned.write())
