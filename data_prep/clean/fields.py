"""Fields of documents: what of them is counted, and which stream a document belongs to.

Licences, languages, flags of personal data, scores: whatever stands beside the text in its source. Nothing is left out
by them; a run weighs streams (docs/mixtures.md), exactly, in every phase as it likes, and without preparing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

from modernbert_train.config.tools.prepare import REST, StreamsConfig
from modernbert_train.core.text import shorten
from modernbert_train.data.field_counts import FieldCounts

_LETTERS = 100  # of a value
_DIGITS = 2  # of a number with a fraction
EMPTY = "(empty)"
Fields = dict[str, FieldCounts]  # of a split: its documents by each of their fields


def as_text(value: Any) -> str | None:
    """A field's value as it is counted; None where there is none.

    A number with a fraction is rounded to two digits, texts of a list are joined, and of a list of anything else its
    length counts: of spans of personal data, how many there are.
    """
    if value is None or isinstance(value, Mapping):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if not isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else f"{value:.{_DIGITS}g}"
    if isinstance(value, str):
        return shorten(" ".join(value.split()), _LETTERS) or None
    if isinstance(value, Sequence):
        texts = all(isinstance(each, str) for each in value)
        value = (", ".join(sorted(set(value))) or EMPTY) if texts else len(value)
    return shorten(str(value), _LETTERS)


def as_score(value: Any) -> float | None:
    """A field's value as a number, also where it is written as text; None where it is none."""
    if not isinstance(value, (bool, int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        return score if isfinite(score := float(value)) else None
    return None


def stream_of(streams: StreamsConfig, fields: Mapping[str, Any]) -> str:
    """The stream of a document with these fields."""
    assert streams.field is not None
    value = fields.get(streams.field)
    if streams.values:
        text = as_text(value)
        return next((name for name, values in streams.values.items() if text in values), REST)
    score = as_score(value)
    reached = [(lowest, name) for name, lowest in streams.scores.items() if score is not None and score >= lowest]
    return max(reached)[1] if reached else REST


def count_fields(into: Fields, values: Mapping[str, str | None], tokens: int) -> None:
    """Count one document by its fields."""
    for name, value in values.items():
        into.setdefault(name, FieldCounts()).count(value, 1, tokens)


def add_fields(into: Fields, later: Fields) -> None:
    """Add what was counted of later documents."""
    for name, counts in later.items():
        into.setdefault(name, FieldCounts()).add(counts)
