"""Fields of documents: how their values are counted, and the stream that a document belongs to.

Fields are any metadata stored with the text: licences, languages, flags of personal data, scores. No document is
dropped by them; a run weights streams (docs/mixtures.md), exactly, per phase, and without preparing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

from modernbert_train.config.tools.prepare import REST, StreamsConfig
from modernbert_train.core.text import shorten
from modernbert_train.data.field_counts import FieldCounts

_LETTERS = 100  # maximum characters of a value
_DIGITS = 2  # decimal places of a number with a fraction
EMPTY = "(empty)"
Fields = dict[str, FieldCounts]  # the documents of a split by each of their fields


def as_text(value: Any) -> str | None:
    """Return a field's value as counted; None without a value.

    A number with a fraction is rounded to two digits, a list of texts is joined, and any other list counts by its
    length: a list of spans of personal data, by their number.
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
    """Return a field's value as a number, also if written as text; None if it is not one."""
    if not isinstance(value, (bool, int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        return score if isfinite(score := float(value)) else None
    return None


def stream_of(streams: StreamsConfig, fields: Mapping[str, Any]) -> str:
    """Return the stream of a document with these fields."""
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
    """Add the counts of later documents."""
    for name, counts in later.items():
        into.setdefault(name, FieldCounts()).add(counts)
