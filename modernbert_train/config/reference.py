"""Every key of runs, data preparation and sweeps as Markdown tables, read from the dataclasses and their comments.

    python -m modernbert_train.config.reference > docs/config.md

The comment beside a field is its documentation, so there is one place to keep right. A test compares the page.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING

from modernbert_train.config.prepare import PrepareConfig
from modernbert_train.config.schema import VARIANTS, RunConfig
from modernbert_train.config.sweep import SweepConfig

_HEAD = """\
# Every key

Written from the code by `python -m modernbert_train.config.reference > docs/config.md`; do not edit.

A run is a YAML file with these keys; `a.b=c` on the command line changes one. A file may begin with
`include: [other.yaml]`, relative to itself: what it names is read first. Unknown keys are refused.
"""


def reference() -> str:
    """The whole page."""
    parts = [_HEAD, "## A run\n", *_section("", RunConfig)]
    parts += ["## Data preparation: the spec of data_prep/prepare.py\n", *_section("", PrepareConfig)]
    parts += ["## Sweeps: the spec of launch/sweep.py\n", *_section("", SweepConfig)]
    return "\n".join(parts)


def _section(path: str, schema: type) -> Iterator[str]:
    """A section's own keys as a table, then the sections within it."""
    inner: list[tuple[str, type]] = []
    rows = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    comments = _comments(schema)
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        here = f"{path}.{field.name}" if path else field.name
        variants = VARIANTS.get(here)
        section = _dataclass(hints[field.name])
        if variants is not None:
            inner += [(f"{here} (name: {name})", variant) for name, variant in variants.items()]
        elif section is not None:
            inner.append((f"{here}.<name>" if _is_dict(hints[field.name]) else here, section))
        else:
            cells = (f"`{here}`", _kind(hints[field.name]), _default(field), _escape(comments.get(field.name, "")))
            rows.append(f"| {' | '.join(cells)} |")
    if path:
        yield f"### {path}\n\n{inspect.getdoc(schema)}\n"
    if len(rows) > 2:
        yield "\n".join(rows) + "\n"
    for where, section in inner:
        yield from _section(where, section)


def _comments(schema: type) -> dict[str, str]:
    """Field name -> the comment on its line, or above it; the classes that it inherits from included."""
    found: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        source = inspect.getsource(owner)
        lines = source.splitlines()
        [node] = ast.parse(source).body
        assert isinstance(node, ast.ClassDef)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                rest = lines[(statement.end_lineno or statement.lineno) - 1][statement.end_col_offset or 0 :]
                above = itertools.takewhile(
                    lambda line: line.strip().startswith("#"), lines[statement.lineno - 2 :: -1]
                )
                words = [rest] if "#" in rest else [*above][::-1]
                if words:
                    found[statement.target.id] = " ".join(word.split("#", 1)[1].strip() for word in words)
    return found


def _dataclass(hint: Any) -> type | None:
    """The dataclass that a key holds, alone, optionally, or as the entries of a dictionary."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint
    return next((found for part in typing.get_args(hint) if (found := _dataclass(part)) is not None), None)


def _is_dict(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _kind(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {_kind(parts[-1])}"
    if parts:
        return " or ".join(_kind(part) for part in parts if part is not type(None)) + " or null"
    return {int: "whole number", float: "number", bool: "true, false", str: "text", Any: "any value"}.get(
        hint, str(hint)
    )


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value == MISSING:
        return "must be set"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple, dict)):
        return "`[" + ", ".join(map(str, value)) + "]`" if not isinstance(value, dict) else "`{}`"
    return str(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(reference())
