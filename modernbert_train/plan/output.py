"""A plan's sections as text for a terminal, and as one HTML page without any request."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from modernbert_train.config.schema import RunConfig
from modernbert_train.errors import StorageError
from modernbert_train.plan.picture import picture_svg, picture_text
from modernbert_train.plan.sections import Section
from modernbert_train.text import table

WIDTH = 118
STYLES = ("chart.css", "page.css")  # of the report
OWN_STYLE = "main > svg { width: 100%; height: auto } .answer td { text-align: left; white-space: normal }"


def as_text(config: RunConfig, sections: Sequence[Section]) -> str:
    """The answer, the other sections and the picture, in lines of at most 118 characters where tables allow."""
    return "\n\n".join([*(_section_text(section) for section in sections), f"Over tokens\n{picture_text(config)}"])


def _section_text(section: Section) -> str:
    out = [section.title]
    if section.flush_left:
        width = max(len(name) for name, _ in section.rows)
        for name, text in section.rows:
            start = f"  {name.ljust(width)}  "
            out += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    else:
        out.append(table(section.rows, indent=2, numbers=True))
    for note in section.notes:
        out += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(out)


def as_html(config: RunConfig, sections: Sequence[Section]) -> str:
    """The same as a page: the answer, which is the first section, then the picture and the tables."""
    style = "".join(files("modernbert_train.report").joinpath(name).read_text("utf-8") for name in STYLES)
    first, *others = (_section_html(section) for section in sections)
    name = escape(config.name)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: plan</title><style>{style}{OWN_STYLE}</style></head>
<body><main><header><h1>{name}: plan</h1></header>
{first}{picture_svg(config, styled=False)}{"".join(others)}</main></body></html>
"""


def _section_html(section: Section) -> str:
    has_head = len(section.rows) > 0 and len(section.rows[0]) > 2  # two columns are names and values
    rows = []
    for index, row in enumerate(section.rows):
        tag = "th" if has_head and index == 0 else "td"
        rows.append("<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in section.notes)
    kind = ' class="answer"' if section.flush_left else ""
    table = f"<table{kind}>{''.join(rows)}</table>"
    return f'<h2>{escape(section.title)}</h2><div class="box wide">{table}</div>{notes}\n'


def write(path: Path, config: RunConfig, sections: Sequence[Section]) -> None:
    """Write the page, or the picture alone if the name ends in .svg.

    Raises:
        StorageError: the file cannot be written.
    """
    text = picture_svg(config) if path.suffix == ".svg" else as_html(config, sections)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}). Name another file.") from error
