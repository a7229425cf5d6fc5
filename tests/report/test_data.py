"""A run's data on its page: drawn from data.json only, with any contents."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from modernbert_train.report.data_json import pictures, read_data
from modernbert_train.report.tables import source_rows
from tests.support.report_page import HOSTILE, statistics


def test_what_is_drawn_is_what_was_counted() -> None:
    """Shares of bars and licences, and each source of a dataset once, for any number of streams."""
    first, second, held_out = pictures(statistics())
    assert first["title"] == "Stream english" and first["note"] == "4 documents with 1 k tokens"
    assert [(start, documents) for start, documents, _, _ in first["bars"]] == [
        (1, 0.25), (32, 0.5), (64, 0), (128, 0), (256, 0), (512, 0.25),
    ]  # fmt: skip
    assert sum(tokens for _, _, tokens, _ in first["bars"]) == pytest.approx(1)
    assert first["fields"] == [
        ["licence", [["MIT", 0.75, "75 % of the tokens, 4 documents"],
                     ["(missing)", 0.25, "25 % of the tokens, 2 documents"]]]
    ]  # fmt: skip
    name, shares, words = first["sources"][0]
    assert (name, shares) == ("web", [0.6, 0.3, 0.0, 0.1])
    assert words == "10 read: kept 60 %, duplicates 30 %, left out otherwise 10 %"
    assert second["sources"] == [] and second["bars"] == first["bars"]
    assert (held_out["title"], held_out["bars"], held_out["fields"]) == ("Held out", [], [])
    assert [row[:3] for row in source_rows(statistics())] == [("web", "10", "6"), (HOSTILE, "2", "2")]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"streams": {"a": {"documents": -1}}, "validation": null}']
)
def test_a_record_that_is_none_draws_nothing(tmp_path: Path, content: str) -> None:
    """A run of an older version lacks the record; the page must not fail."""
    assert read_data(tmp_path) is None
    (tmp_path / "data.json").write_text(content)
    assert read_data(tmp_path) is None and pictures(None) == [] and source_rows(None) == []


def test_the_record_comes_back(tmp_path: Path) -> None:
    """It is read back unchanged."""
    found: dict[str, Any] = asdict(statistics())
    (tmp_path / "data.json").write_text(json.dumps(found))
    assert read_data(tmp_path) == statistics()
