"""Refuse a folder that was made with other settings: one form for a changed key, one text for the refusal."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from modernbert_train.errors import ConfigError


class Change(NamedTuple):
    """A key whose value has changed; None for a missing value."""

    key: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def refuse(claim: str, changes: Collection[object], remedy: str) -> None:
    """Raise ConfigError if anything has changed: CLAIM, a line for each change, REMEDY."""
    if changes:
        raise ConfigError("\n  ".join([f"{claim}:", *map(str, changes)]) + f"\n{remedy}")
