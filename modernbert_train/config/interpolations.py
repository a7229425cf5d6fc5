"""Bound the length of a configuration's texts after every `${key}` is replaced, without replacing any.

`${a}${a}`, where a is `${b}${b}` and so on, doubles at every key: thirty lines would be a gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from modernbert_train.config.bounded_yaml import MAX_CHARACTERS, MAX_DEPTH
from modernbert_train.config.read import shown

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_NESTED = re.compile(r"\$\{[^}]*\$\{")
_Path = tuple[str, ...]


class _Whole(NamedTuple):
    """A text with all keys it refers to written out."""

    characters: int
    steps: int  # keys that refer to keys, one after the other


def interpolation_mistake(tree: Mapping[str, Any]) -> str | None:
    """The first value that would become too long, or refers to others in too many steps; None without one.

    Args:
        tree: the merged configuration, its texts as they were written.
    """
    known: dict[_Path, _Whole] = {}
    for path, text in _texts(tree, ()):
        reason = None
        if _NESTED.search(text):
            reason = "a key within the name of a key"
        else:
            whole = _written_out(tree, path, text, known, 0)
            if whole.steps > MAX_DEPTH:
                reason = f"refers to itself, or to keys that refer to keys more than {MAX_DEPTH} times"
            elif whole.characters > MAX_CHARACTERS:
                reason = (
                    f"would become {whole.characters:,} characters, the keys it refers to written out; the limit is "
                    f"{MAX_CHARACTERS:,}"
                )
        if reason is not None:
            return f"{'.'.join(path)}={shown(text)}: {reason}. Write the value itself."
    return None


def _written_out(tree: Mapping[str, Any], path: _Path, text: str, known: dict[_Path, _Whole], depth: int) -> _Whole:
    """What a text becomes; a key that is not there counts as nothing, and is told when it is replaced."""
    if depth > MAX_DEPTH:
        return _Whole(0, depth)
    if path not in known:
        characters, steps = len(text), 0
        for reference in _REFERENCE.findall(text):
            there = _target(path, reference)
            for at, found in _texts(_find(tree, there), there):
                inner = _written_out(tree, at, found, known, depth + 1)
                characters += inner.characters
                steps = max(steps, inner.steps + 1)
        known[path] = _Whole(characters, steps)
    return known[path]


def _target(path: _Path, reference: str) -> _Path:
    """The key that a reference names; dots in front go up from the section that the reference stands in."""
    name = reference.strip().lstrip(".")
    up = len(reference.strip()) - len(name)
    parts = tuple(part for part in re.split(r"[.\[\]]+", name) if part)
    return (*path[: len(path) - up], *parts) if up else parts


def _find(tree: Any, path: _Path) -> Any:
    for part in path:
        if isinstance(tree, Mapping):
            tree = tree.get(part)
        elif isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree


def _texts(value: Any, path: _Path) -> Iterator[tuple[_Path, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, (*path, str(number)))
    elif isinstance(value, str):
        yield path, value
