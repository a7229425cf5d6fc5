"""Refuse a folder made with other settings: list its changed keys, and give one message for all callers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from modernbert_train.core.trees import dotted
from modernbert_train.errors import ConfigError

# advice of `train`; other verbs lack this flag, see train/recipes.py
START_OVER = "start over with --fresh (the old run is kept under another name)"


class Change(NamedTuple):
    """A key whose value has changed; None for a missing value."""

    key: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the keys whose values differ, by dotted path; an empty object counts as missing."""
    old, new = ({key: value for key, value in dotted(tree).items() if value != {}} for tree in (before, now))
    return [Change(key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)]


def refuse(claim: str, changes: Collection[object], remedy: str) -> None:
    """Raise ConfigError if anything has changed: CLAIM, a line for each change, REMEDY."""
    if changes:
        raise ConfigError("\n  ".join([f"{claim}:", *map(str, changes)]) + f"\n{remedy}")
