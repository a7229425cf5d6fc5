"""A plan's sections as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from modernbert_train.core.text import table
from modernbert_train.plan.sections import Section

WIDTH = 118


def as_text(sections: Sequence[Section]) -> str:
    """Format the answer and the other sections, in lines of at most 118 characters where tables allow."""
    return "\n\n".join(_section_text(section) for section in sections)


def _section_text(section: Section) -> str:
    out = [section.title]
    if section.flush_left:
        width = max(len(name) for name, _ in section.rows)
        for name, text in section.rows:
            start = f"  {name.ljust(width)}  "
            out += textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    elif section.rows:
        out.append(table(section.rows, indent=2, numbers=True))
    for note in section.notes:
        out += textwrap.wrap(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(out)
