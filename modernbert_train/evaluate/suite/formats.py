"""A table as Markdown, as CSV, and as LaTeX for a paper; names of models, tasks and sources are escaped in each."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from modernbert_train.core.text import markdown_table, markdown_text, on_one_line
from modernbert_train.evaluate.suite import efficiency

Table = dict[str, Any]  # as table.json
Cell = Mapping[str, Any]

_SPREAD = "mean ± sample standard deviation over seeds (number of seeds)"
_LATEX = {each: f"\\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_CSV = ("model", "published", "task", "split", "metric", "mean", "standard_deviation", "seeds", "of_seeds", "chosen")


def as_markdown(table: Table) -> str:
    """Return the table in percent, with its notes and the table of speed."""
    average = any(row["average"] is not None for row in table["rows"])
    head = ["model", *(markdown_text(_heading(each)) for each in table["columns"]), *["average"] * average]
    rows = [[markdown_text(row["model"]), *map(_shown, _cells(row, average))] for row in table["rows"]]
    quality = [markdown_table(head, rows), "", f"In percent: {_SPREAD}."] if table["columns"] else []
    speed = ["", efficiency.as_markdown(table["efficiency"])] if table["efficiency"] else []
    return "\n".join([*quality, *(f"- {markdown_text(note)}" for note in table["notes"]), *speed]) + "\n"


def as_csv(table: Table) -> str:
    """Return a line for each cell, figures as shares of 1; a cell without a figure has its reasons in `problems`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_CSV, "source", "problems"])
    for row in table["rows"]:
        for column, cell in zip(table["columns"], row["cells"], strict=True):
            figures = cell or {}
            writer.writerow(
                [
                    *map(_for_csv, (row["model"], str(bool(row.get("published"))).lower())),
                    *(column[key] for key in ("task", "split", "metric")),
                    *(figures.get(key) for key in ("mean", "standard_deviation", "n", "of")),
                    *map(_for_csv, (figures.get("chosen"), row["source"], "; ".join(figures.get("failed", ())))),
                ]
            )
    return out.getvalue()


def as_latex(table: Table) -> str:
    """Return a booktabs tabular in percent, the best of each column in bold; sources and notes as comments."""
    average = any(row["average"] is not None for row in table["rows"])
    head = ["Model", *(_heading(each) for each in table["columns"]), *["average"] * average]
    best = [max(map(_percent, column), default=None) for column in zip(*_all(table, average), strict=True)]
    lines = [
        "% needs \\usepackage{booktabs}",
        f"% In percent: {_SPREAD}. Bold: the best of a column.",
        *(f"% {_for_latex(note)}" for note in table["notes"]),
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        "\\toprule",
        " & ".join(map(_for_latex, head)) + r" \\",
        "\\midrule",
    ]
    published = False
    for row in table["rows"]:
        if row.get("published") and not published:
            published = True
            lines.append("\\midrule")
        cells = []
        for cell, top in zip(_cells(row, average), best, strict=True):
            text = _for_latex(_shown(cell))
            cells.append(f"\\textbf{{{text}}}" if cell and cell["mean"] is not None and _percent(cell) == top else text)
        # {}: \midrule and \\ would take a bracket or a star after them as their own
        lines.append("{}" + " & ".join([_for_latex(row["model"]), *cells]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def _heading(column: Mapping[str, str]) -> str:
    return f"{column['task']} {column['metric']}" + (f", {column['split']}" if column["split"] else "")


def _cells(row: Mapping[str, Any], average: bool) -> list[Cell | None]:
    return [*row["cells"], *[row["average"]] * average]


def _all(table: Table, average: bool) -> Sequence[Sequence[Cell | None]]:
    return [_cells(row, average) for row in table["rows"]]


def _percent(cell: Cell | None) -> float:
    """Return the mean rounded as shown, so that equal figures are both the best."""
    return float("-inf") if cell is None or cell["mean"] is None else round(100 * cell["mean"], 2)


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell["mean"] is None:
        return "not run" if cell.get("unfit") else "failed" if cell.get("failed") else "-"
    deviation, of = cell["standard_deviation"], cell.get("of", cell["n"])
    seeds = f" ({cell['n']}{f' of {of}' if of > cell['n'] else ''})" if cell["seeds"] else ""
    return f"{100 * cell['mean']:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}") + seeds


def _for_latex(text: str) -> str:
    return "".join(_LATEX.get(each, each) for each in on_one_line(text))


def _for_csv(text: str | None) -> str | None:
    """Return text that a spreadsheet does not take for a formula."""
    text = text and on_one_line(text)
    return f"'{text}" if text and re.match(r"[=+\-@]", text) else text
