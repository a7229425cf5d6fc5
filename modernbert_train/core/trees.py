"""Trees of plain values, as YAML and JSON give them: their values by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]


def leaves(tree: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value with its path; an empty mapping is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return every value by its dotted key."""
    return {".".join(path): value for path, value in leaves(tree)}
