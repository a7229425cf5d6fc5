"""Documents of a source: the text of each row, with its fields and words, or the reason why it is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_prep.read.html import STRIPPED, html_text, is_html
from data_prep.read.segmented_words import Words, differs, words_of
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.data.read.rows import TEXT, Columns, LeftOut, Row, Span, lacking_field
from modernbert_train.data.read.sources import read_rows, whole_spans


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        id, altered: see `Row`.
        text: unchanged.
        fields: values of its source's fields, unchanged; see clean/fields.py.
        words: a segmenter's words, if the source names a column; see segmented_words.py.
    """

    id: str
    text: str
    altered: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    words: Words | None = None


def read_source(name: str, source: SourceConfig, max_characters: int) -> Iterator[Document | LeftOut]:
    """Yield a whole source in a fixed order: sorted files, and within a file in its order. Raises as its parts."""
    for span in whole_spans(name, source):
        yield from read_span(span, source, max_characters)


def read_span(span: Span, source: SourceConfig, max_characters: int) -> Iterator[Document | LeftOut]:
    """Yield the documents of a span; as `read_rows`."""
    for item in read_rows(span, source, columns_of(source), max_characters):
        yield take_text(item, source) if isinstance(item, Row) else item


def take_text(row: Row, source: SourceConfig) -> Document | LeftOut:
    """Return the text of a row and its fields, by the columns of a source."""
    text_field = source.text_field or TEXT
    text = row.value(text_field)
    if text is None and (problem := lacking_field(row.fields, text_field)) is not None:
        return LeftOut(row.id, "no_text", problem)
    if not isinstance(text, str):
        return LeftOut(row.id, "no_text", f"field {text_field!r} is {'null' if text is None else type(text).__name__}")
    if source.strip is None and source.kind == "text" and is_html(row.id, text):
        return LeftOut(row.id, "html", "HTML, and its source does not set strip")
    altered = row.altered
    if source.strip == "html":
        try:
            text, altered = html_text(text), altered or STRIPPED
        except ValueError as error:
            return LeftOut(row.id, "not_html", str(error))
    fields: Mapping[str, Any] = source.fixed_fields
    if source.fields:
        values = {name: row.value(column) for name, column in source.fields.items()}
        fields = {name: value for name, value in values.items() if value is not None} | source.fixed_fields
    if source.words_field is None:
        return Document(row.id, text, altered, fields)
    words = words_of(row.value(source.words_field))
    if words is None:
        return LeftOut(row.id, "no_words", f"field {source.words_field!r} holds neither a list of words nor a text")
    if (other := differs(words, text)) is not None:
        return LeftOut(row.id, "other_words", f"field {source.words_field!r} does not spell the text: {other}")
    return Document(row.id, text, altered, fields, words)


def columns_of(source: SourceConfig) -> Columns:
    """Return the columns that the documents of a source need."""
    optional = (*source.fields.values(), *filter(None, [source.words_field]))
    return Columns((source.text_field or TEXT,), optional)
