"""table.json of many fine-tunings -> report.html beside it, a function of table.json and of the picture beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import number, read_json
from modernbert_train.core.text import fixed, plural, shorten
from modernbert_train.errors import DataError
from modernbert_train.report.page import plain_page, write

TABLE, PICTURE = "table.json", "table.svg"
MOST = 200  # models, and figures, on a page
_LETTERS = 60
NUMBER = fixed(4)


def is_table(folder: Path) -> bool:
    """Whether a folder is that of many fine-tunings, and not of a run."""
    return (folder / TABLE).is_file() and not (folder / "config.yaml").is_file()


def write_table_page(folder: Path, out: Path | None = None) -> Path:
    """Draw the table of a folder.

    Args:
        folder: of the runs.
        out: the page; None is <folder>/report.html.

    Returns:
        The page's path. An older page is replaced whole or not at all.

    Raises:
        DataError: the table is missing or damaged.
        StorageError: the page cannot be written.
    """
    file = folder / TABLE
    try:
        columns, rows, notes = _read(read_json(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: cannot be read ({error}). The command that made it makes it again, and trains nothing twice."
        ) from None
    picture = (folder / PICTURE).read_text("utf-8") if (folder / PICTURE).is_file() else ""
    return write(out or folder / "report.html", _render(folder.resolve().name, columns, rows, notes, picture))


class _Cell:
    """Mean, standard deviation and values of a model's seeds; of nothing where it was not measured."""

    def __init__(self, found: Mapping[str, Any] | None) -> None:
        found = found or {"mean": None, "standard_deviation": None, "seeds": {}}
        values = {str(seed): number(value) for seed, value in found["seeds"].items()}
        self.seeds = {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}
        self.mean, self.deviation = number(found["mean"]), number(found["standard_deviation"])

    def __str__(self) -> str:
        if self.mean is None:
            return "none"
        deviation = "" if self.deviation is None else f" ± {NUMBER(self.deviation)}"
        return f"{NUMBER(self.mean)}{deviation} ({len(self.seeds)})"


_Row = tuple[str, list[_Cell], _Cell]  # model, figures, average


def _read(table: Any) -> tuple[list[str], list[_Row], list[str]]:
    """Names of the figures; the rows; what is to be said."""
    columns = []
    for column in table["columns"][:MOST]:
        splits = {str(each["split"]) for each in table["columns"] if each["task"] == column["task"]}
        split = f", {column['split']}" if len(splits) > 1 else ""
        columns.append(shorten(f"{column['task']}: {column['metric']}{split}", _LETTERS))
    rows = [
        (
            shorten(str(row["model"]), _LETTERS),
            [_Cell(cell) for cell in row["cells"][:MOST]],
            _Cell(row["average"]),
        )
        for row in table["rows"][:MOST]
    ]
    if any(len(cells) != len(columns) for _, cells, _ in rows):
        raise ValueError("a row is shorter than its columns")
    return columns, rows, [str(note) for note in table["notes"]]


def _render(name: str, columns: Sequence[str], rows: Sequence[_Row], notes: Sequence[str], picture: str) -> str:
    runs = sum(len(cell.seeds) for _, cells, _ in rows for cell in cells[:1])
    note = f"{plural(len(rows), 'model')}, {plural(len(columns), 'figure')}" if runs else "Nothing measured yet"
    heading = f"<header><h1>{escape(name)}</h1><p>{note}</p></header>"
    drawn = f'<section class="box wide">{picture}</section>' * bool(picture)
    return plain_page(f"{name}: fine-tunings", heading + drawn + _table(columns, rows, notes))


def _table(columns: Sequence[str], rows: Sequence[_Row], notes: Sequence[str]) -> str:
    has_average = any(average.mean is not None for _, _, average in rows)
    head = ["Model", *columns, *(["Average"] if has_average else [])]
    bests = [_best([cells[index] for _, cells, _ in rows]) for index in range(len(columns))]
    best = _best([average for _, _, average in rows])
    lines = []
    for place, (model, cells, average) in enumerate(rows, start=1):
        shown = [_shown(cell, best) for cell, best in zip(cells, bests, strict=True)]
        shown += [_shown(average, best)] if has_average else []
        lines.append(f"<tr><td>{place} {escape(model)}</td>{''.join(f'<td>{each}</td>' for each in shown)}</tr>")
    heads = "".join(f"<th>{escape(each)}</th>" for each in head)
    said = "".join(f'<p class="box note warn">{escape(note)}</p>' for note in notes)
    return (
        f'{said}<section class="box wide"><h2>Mean ± standard deviation over seeds (their number)</h2><table><thead>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></section>"
    )


def _best(cells: Sequence[_Cell]) -> float | None:
    return max((cell.mean for cell in cells if cell.mean is not None), default=None)


def _shown(cell: _Cell, best: float | None) -> str:
    text = escape(str(cell))
    return f"<b>{text}</b>" if cell.mean is not None and cell.mean == best and cell.seeds else text
