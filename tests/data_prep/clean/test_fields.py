"""Fields of documents, from files to counts and streams: a licence that is counted wrongly is published as a claim."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.clean.clean_documents import Tally
from data_prep.clean.fields import as_score, as_text, stream_of
from data_prep.read.documents import Document, read_source
from modernbert_train.config.tools.prepare import SourceConfig, StreamsConfig
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.field_counts import FieldCounts
from tests.support.corpora import Command, Refusal, report_of, write_rows


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


ROWS: list[dict[str, Any]] = [
    {"text": "one", "meta": {"licence": "MIT"}, "score": 2.5, "pii": True},
    {"text": "two", "meta": {"licence": None}, "score": 0.25, "pii": False},
]
FIELDS = {"licence": "meta.licence", "score": "score", "pii": "pii", "gone": "gone"}


def write(kind: str, folder: Path) -> None:
    if kind == "mds":
        from tests.support.layouts import write_mds

        columns = {"text": "str", "meta": "json", "score": "float64", "pii": "uint8", "bad": "pkl"}
        write_mds(folder / "mds", columns, [{**row, "pii": int(row["pii"]), "bad": {1, 2}} for row in ROWS])
    else:
        named = [row | {"meta.licence": row["meta"]["licence"]} for row in ROWS]
        write_rows(folder / f"a.{kind}", named if kind == "csv" else ROWS)


@pytest.mark.weekly
@pytest.mark.parametrize("kind", ["jsonl", "parquet", pytest.param("csv", marks=pytest.mark.slow), "mds"])
def test_every_kind_of_file_has_fields(kind: str, tmp_path: Path) -> None:
    """A missing field is not an error, and fields that are not configured are not read."""
    write(kind, tmp_path)
    source = SourceConfig(kind=kind, path=str(tmp_path), fields=FIELDS, fixed_fields={"from": "here"})  # type: ignore[arg-type]
    documents = [item for item in read_source("mine", source, 1000) if isinstance(item, Document)]
    assert [document.text for document in documents] == ["one", "two"]
    first, second = (dict(document.fields) for document in documents)
    assert float(first.pop("score")) == 2.5 and first.pop("pii") in (True, 1, "True")
    assert first == {"licence": "MIT", "from": "here"}
    assert float(second.pop("score")) == 0.25 and second.pop("pii") in (False, 0, "False")
    assert second in ({"from": "here"}, {"licence": "", "from": "here"})


@pytest.fixture
def lines(tmp_path: Path, texts: list[str]) -> list[str]:
    """Return words that add a source with fields: 40 texts of three languages, one of them with two copies."""
    rows = [
        {"text": f"{text} again", "lang": ["en", "de", "nl"][i % 3], "score": i / 10} for i, text in enumerate(texts)
    ]
    rows += [rows[0], rows[0]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ["sources.rows.kind=jsonl", f"sources.rows.path={tmp_path / 'rows.jsonl'}"]
    return [*source, "sources.rows.fields={language: lang, score: score}", "sources.mine.fixed_fields.language=en"]


@pytest.mark.runs
def test_documents_become_streams_and_none_is_lost(
    command: Command, lines: list[str], tmp_path: Path, capsys: Any
) -> None:
    """The streams by language contain all that was kept, each document in one folder, and the cards describe all."""
    assert command(*lines, "streams={field: language, values: {english: [en], german: [de]}}") == 0
    said = capsys.readouterr().out
    out = tmp_path / "out"
    assert f"    german: {{path: {out}/train-german, repeat: 1}}" in said
    assert "train-german, language by tokens: de 100 %" in said
    assert "validation, score by tokens: " in said
    report = report_of(out)
    assert set(report["written"]) == {"train-english", "train-german", "train-rest", "validation"}
    assert sum(split["documents"] for split in report["written"].values()) == 120
    assert report["dropped"] == {"duplicate": 2}
    languages: dict[str, int] = {}
    for split, numbers in report["written"].items():
        card = read_card(out / split)
        assert (card.documents, card.tokens) == (numbers["documents"], numbers["tokens"])
        assert card.fields is not None and list(card.fields) == ["language", "score"]
        for counts in card.fields.values():
            rows = counts.rows()
            assert sum(amount.documents for _, amount in rows) == card.documents
            assert sum(amount.tokens for _, amount in rows) == card.tokens
        for language, amount in card.fields["language"].rows():
            languages[language] = languages.get(language, 0) + amount.documents
        assert set(card.fields["language"].values) <= {
            "train-english": {"en"}, "train-german": {"de"}, "train-rest": {"nl"}, "validation": {"en", "de", "nl"},
        }[split]  # fmt: skip
        assert sum(bin["documents"] for bin in report["lengths"][split]) == card.documents
    assert languages == {"en": 80, "de": 20, "nl": 20}
    assert command(*lines, "streams={field: language, values: {german: [de], english: [en]}}") == 0
    assert "already complete" in capsys.readouterr().out
    assert command(*lines) == 78  # other folders: another dataset
    assert "streams" in capsys.readouterr().err


@pytest.mark.runs
def test_a_stream_that_stays_empty_is_reported_with_what_the_field_holds(refusal: Refusal, lines: list[str]) -> None:
    """`eng` instead of `en` would silently cost the run a language."""
    said = "streams.values.english: no training document belongs to it. language is: en in 82, de in 20, nl in 20"
    assert said in refusal(65, *lines, "streams={field: language, values: {english: [eng]}}")
