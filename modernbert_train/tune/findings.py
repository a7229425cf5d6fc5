"""What a tune leaves: a table as Markdown and JSON, a picture, and the settings that runs take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from modernbert_train.errors import StorageError
from modernbert_train.files import write_whole
from modernbert_train.run.tuned import SETTINGS, Tuned
from modernbert_train.text import markdown_table

TABLE, MARKDOWN, PICTURE = "table.json", "table.md", "tuned.svg"
_BAR, _LEFT, _ROW, _WIDTH = 300, 440, 26, 900


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


def as_picture(report: Report) -> str:
    """A bar for each candidate that was timed, by its question; 1 is what there was before."""
    rows = [row for row in report.rows if row.ratio is not None]
    most = max([1.0, *(row.ratio or 0.0 for row in rows)])
    height = _ROW * (len(rows) + 2)
    one = _LEFT + _BAR / most
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        f"<title>{escape(report.title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" fill="#222222">{escape(report.title)}</text>',
    ]
    for number, row in enumerate(rows, 1):
        y = _ROW * number + 6
        color = "#1b7837" if row.outcome == "taken" else "#8c8c8c"
        width = _BAR * (row.ratio or 0.0) / most
        name = escape(f"{row.question}: {row.settings}"[:60])
        parts += [
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#222222">{name}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" fill="{color}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{y + 14}" fill="#222222">{row.ratio:.2f} x</text>',
        ]
    parts.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{_ROW}" y2="{height - _ROW + 4}" stroke="#222222" '
        'stroke-dasharray="3 3"/></svg>'
    )
    return "\n".join(parts) + "\n"


def write_findings(folder: Path, report: Report, tuned: Tuned) -> None:
    """Write all of it, the settings last.

    Raises:
        StorageError: the disk refuses it.
    """
    as_json: dict[str, Any] = asdict(report) | {"settings": dict(tuned.settings), "date": tuned.date}
    try:
        write_whole(folder / MARKDOWN, as_markdown(report) + "\n")
        write_whole(folder / TABLE, json.dumps(as_json, indent=2) + "\n")
        write_whole(folder / PICTURE, as_picture(report))
        write_whole(folder / SETTINGS, tuned.write())
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot be written ({error.strerror}). Free some space; the same command resumes."
        ) from error
