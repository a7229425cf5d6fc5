"""A table of a run's page, as text; the page puts it into cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Title, heads of the columns, lines of cells, and a sentence before them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
