"""Fields and streams from files of every kind to the cards, and mistakes in their spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.read.documents import Document, read_source
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.data.dataset_card import read_card
from tests.support.corpora import Command, Refusal, report_of, write_rows

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
