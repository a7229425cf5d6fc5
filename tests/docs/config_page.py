"""Write every key of runs, data preparation and sweeps as Markdown, from the dataclasses, their comments and facts.

    python -m tests.docs.config_page > docs/config.md

A field's comment is its documentation, so there is one place to keep right. A test compares the page. Each key
has its own heading, its full dotted name, so that a search finds it, a link leads to it, and no column cuts it; names
are in backticks, because some renderers drop text in angle brackets.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

from omegaconf import MISSING

from modernbert_train.config.knob import Knob, facts_of, phased_keys
from modernbert_train.config.renamed import RENAMED
from modernbert_train.config.schema import VARIANTS, RunConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.config.tools.pairs import PairsConfig
from modernbert_train.config.tools.prepare import PrepareConfig
from modernbert_train.config.tools.retrieval import MeasureConfig, MineConfig, RetrievalConfig
from modernbert_train.config.tools.sweep import SweepConfig

_HEAD = """\
# Every key

Written from the code by `python -m tests.docs.config_page > docs/config.md`; do not edit.

A run is a YAML file with these keys; `a.b=c` on the command line changes one. A file may begin with
`include: [other.yaml]`, relative to itself, to read other files first. Unknown keys are refused. `<name>` is a
name of your choice.
"""
_ROOTS: dict[str, type] = {  # the heading on the page -> the tree of keys
    "A run": RunConfig,
    "Data preparation: the spec of `prepare`": PrepareConfig,
    "Pairs of texts: a spec of `prepare` with a section `pairs`": PairsConfig,
    "Fine-tuning: a task of `finetune`": TaskConfig,
    "Retrieval: a recipe of `retrieval train`": RetrievalConfig,
    "Retrieval: keys of `retrieval evaluate`": MeasureConfig,
    "Retrieval: keys of `retrieval mine`": MineConfig,
    "Sweeps: the spec of `sweep`": SweepConfig,
}


@dataclasses.dataclass(frozen=True)
class _Section:
    """A dataclass at its place in the tree.

    Attributes:
        path: dotted; empty at the root.
        schema: the dataclass.
        variant: the `name` that chooses this schema, if there are several.
        note: the name and the comment of the field that holds it.
    """

    path: str
    schema: type
    variant: str | None = None
    note: str = ""

    def title(self, path: str) -> str:
        """Return the heading of the section, or of a key in it."""
        return f"`{path}`" + (f" ({self.variant})" if self.variant else "")


def reference() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for title, root in _ROOTS.items():
        parts.append(f"## {title}\n")
        found = [*_sections(_Section("", root))]
        titles = [section.title(section.path) for section in found[1:]]
        if titles:
            parts.append("Sections: " + ",\n".join(f"[{title}](#{slug(title)})" for title in titles) + ".\n")
        for section in found:
            parts += _written(section)
    parts.append("## Keys that have another name now\n\n| old | new |\n| --- | --- |")
    parts += [f"| `{old}` | `{new}` |".replace("*", "<name>") for old, new in RENAMED.items()]
    return "\n".join(parts) + "\n"


def slug(title: str) -> str:
    """Return the anchor of GitHub and mkdocs for a heading that is unique so far."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _sections(section: _Section) -> Iterator[_Section]:
    """Yield a section, then those within it."""
    yield section
    comments, hints = _comments(section.schema), typing.get_type_hints(section.schema)
    for field in dataclasses.fields(section.schema):
        here = _join(section.path, field.name)
        about = [comments.get(field.name, ""), ", ".join(_changes(facts_of(field)))]
        note = "; ".join(text for text in about if text)
        note = f"`{here}`: {note}" if note else ""
        inner = _dataclass(hints[field.name])
        place = f"{here}.<name>" if typing.get_origin(hints[field.name]) is dict else here
        if here in VARIANTS:
            for name, schema in VARIANTS[here].items():
                yield from _sections(_Section(place, schema, name, note))
        elif inner is not None:
            yield from _sections(_Section(place, inner, None, note))


def _written(section: _Section) -> Iterator[str]:
    """Yield a section's heading and sentences, then each of its keys."""
    comments, hints = _comments(section.schema), typing.get_type_hints(section.schema)
    if section.path:
        yield f"### {section.title(section.path)}\n"
        docstring = ast.get_docstring(_source(section.schema)[1])  # dataclasses generate one where it is missing
        assert docstring is not None, f"{section.schema.__qualname__} lacks a docstring"
        yield f"{_prose(docstring)}\n"
        if section.note:
            yield f"{_prose(section.note)}\n"
    for field in dataclasses.fields(section.schema):
        path = _join(section.path, field.name)
        if path in VARIANTS or _dataclass(hints[field.name]) is not None:
            continue
        if facts_of(field).overrides:
            yield from _overrides(path, field.name)
            continue
        yield f"#### {section.title(path)}\n"
        meaning = _prose(comments.get(field.name, ""))
        facts = facts_of(field)
        parts = [_kind(hints[field.name]), _default(field), facts.bounds(), *_changes(facts)]
        about = "; ".join(text for text in parts if text)
        if section.variant and field.name == "name":
            about = f"`{section.variant}` chooses these keys"
        yield f"{about}<br>\n{meaning}\n" if meaning else f"{about}\n"


def _overrides(path: str, section: str) -> Iterator[str]:
    """Yield the keys of a section that a phase may override, each once for all variants."""
    keys = dict.fromkeys(key for schema in VARIANTS[section].values() for key in phased_keys(schema))
    for key in keys:
        yield f"#### `{path}.{key}`\n"
        yield f"as `{section}.{key}`, in this phase; default: the run's\n"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@functools.cache
def _source(schema: type) -> tuple[list[str], ast.ClassDef]:
    """Return the lines of a class and its syntax tree."""
    source = inspect.getsource(schema)
    [node] = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return source.splitlines(), node


def _comments(schema: type) -> dict[str, str]:
    """Return field name -> the comment on its line, or above it, including inherited fields."""
    found: dict[str, str] = {}
    for owner in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        lines, node = _source(owner)
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
    """Return the dataclass that a key holds, alone, optional, or as the entries of a dictionary."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint
    return next((found for part in typing.get_args(hint) if (found := _dataclass(part)) is not None), None)


def _kind(hint: Any, many: bool = False) -> str:
    """Describe the accepted values, or several of them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is dict:
        return f"{'mappings' if many else 'a mapping'} of names to {_kind(parts[-1], True)}"
    if origin in (list, tuple):
        number = f"{len(parts)} " if origin is tuple and parts[-1] is not Ellipsis else ""
        return f"{'lists' if many else 'a list'} of {number}{_kind(parts[0], True)}"
    if parts:
        return " or ".join(_kind(part) for part in parts if part is not type(None)) + " or null"
    return _WORDS[hint][many]


_WORDS: dict[Any, tuple[str, str]] = {
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    bool: ("`true`, `false`", "true or false"),
    str: ("text", "texts"),
    Any: ("any value", "any values"),
}


def _changes(facts: Knob) -> Iterator[str]:
    """Describe what may change the key."""
    if facts.phased:
        yield "a phase may have its own"
    if facts.restart:
        yield "may change at a restart"
    if facts.local:
        yield "may differ between machines"


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value == MISSING:
        return "must be set"
    return f"default `{_literal(value)}`"


def _literal(value: Any) -> str:
    """Format a default as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}" if value >= 10_000 else str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "{}" if isinstance(value, dict) else str(value)


def _prose(text: str) -> str:
    """Escape sentences for Markdown, and link the pages that they name."""
    parts = text.split("`")  # every second one is code
    for index in range(0, len(parts), 2):
        part = re.sub(r"\bNone\b", "null", parts[index])
        part = part.replace("&", "&amp;").replace("<", "&lt;").replace("*", r"\*")
        parts[index] = re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", part)
    return "`".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
