"""Fields of documents: a licence that is counted wrongly is published as a claim."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.clean.documents import Tally
from data_prep.clean.fields import as_score, as_text, stream_of
from modernbert_train.config.tools.prepare import StreamsConfig
from modernbert_train.data.field_counts import FieldCounts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("MIT ", "MIT"), ("", None), (None, None), ({"a": 1}, None), (math.nan, None), (True, "true"), (0, "0"),
        (3, "3"), (3.0, "3"), (0.93471, "0.93"), (["b", "a", "b"], "a, b"), ([], "(empty)"),
        ([{"start": 1}, {"start": 9}], "2"),
    ],
)  # fmt: skip
def test_a_value_is_counted_as_what_a_reader_would_call_it(value: Any, text: str | None) -> None:
    """An empty value, no spans and a missing column are three different things."""
    assert as_text(value) == text


def test_long_values_are_cut() -> None:
    """The card stays small."""
    assert len(as_text("x" * 10_000) or "") == 100


@pytest.mark.parametrize(
    ("value", "score"), [("2.5", 2.5), (2, 2.0), ("much", None), (None, None), ("inf", None), ([], None)]
)
def test_scores_are_numbers_however_they_are_written(value: Any, score: float | None) -> None:
    """A CSV file contains only text."""
    assert as_score(value) == score


def test_a_score_belongs_to_the_highest_stream_that_it_reaches() -> None:
    """A stream ends where the next one begins, in any order of the spec."""
    streams = StreamsConfig(field="score", scores={"best": 4.0, "good": 2.5})
    found = [stream_of(streams, {"score": score}) for score in (4.0, "3.999", 2.5, 2.4999, None, "none")]
    assert found == ["best", "good", "good", "rest", "rest", "rest"]
    assert stream_of(streams, {}) == "rest"


def test_values_belong_to_their_stream() -> None:
    """Values that no stream names go to the rest, and so into the counts."""
    streams = StreamsConfig(field="language", values={"english": ["en"], "romance": ["fr", "it"]})
    assert [stream_of(streams, {"language": each}) for each in ("en", "it", "de", None)] == [
        "english", "romance", "rest", "rest",
    ]  # fmt: skip


VALUES = st.lists(st.one_of(st.none(), st.integers(0, 1500).map(str)), max_size=60)


@pytest.mark.runs
@given(parts=st.lists(VALUES, max_size=6))
def test_nothing_is_lost_in_adding_up(parts: list[list[str | None]]) -> None:
    """The tasks' counts add up to the whole; the totals are the dataset's."""
    total, whole = Tally(), Tally()
    for part in parts:
        found = Tally()
        for value in part:
            found.count_fields("train", {"id": value}, 7)
            whole.count_fields("train", {"id": value}, 7)
        total.add(Tally.from_json(json.loads(json.dumps(found.to_json()))))
    assert total == whole
    for counts in total.fields.get("train", {}).values():
        rows = counts.listed().rows()
        assert sum(amount.documents for _, amount in rows) == sum(map(len, parts))
        assert sum(amount.tokens for _, amount in rows) == 7 * sum(map(len, parts))


def test_a_column_of_addresses_does_not_fill_the_memory() -> None:
    """Of a million values a thousand are held, a hundred are listed, and all are counted."""
    counts = FieldCounts()
    for number in range(5000):
        counts.count(f"https://{number}", 1, 3)
    counts.count("https://7", 1, 100)
    assert len(counts.values) == 1000
    listed = counts.listed()
    assert len(listed.values) == 100 and next(iter(listed.values)) == "https://7"
    assert sum(amount.documents for _, amount in listed.rows()) == 5001
    assert str(listed).startswith("https://7 0.7 %, https://0 ") and "(other)" in str(listed)
