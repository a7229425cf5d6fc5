"""Items that all readers share: rows, documents, and items that are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.read.encodings import AUTO, SURE, UTF_8, codec_of, family, guess, is_ascii_based, is_surely_utf_8
from data_prep.read.html import STRIPPED, html_text, is_html
from data_prep.read.words import Words, differs, words_of
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.core.text import shorten

BYTE_ORDER_MARK = "byte_order_mark"
_LETTERS = 300  # of the names of columns


class Row(NamedTuple):
    """A row of any format.

    Attributes:
        id: its file, with the line, row or byte if a file holds several.
        fields: the values of its columns, unchanged.
        altered: the change made on reading, as the report counts it; None without one.
    """

    id: str
    fields: Mapping[str, Any]
    altered: str | None = None


class Columns(NamedTuple):
    """The columns to read from a source.

    Attributes:
        required: a file without one of them is left out.
        optional: read if present.
        unique: refuse a header or an object that has one of `required` twice; else the first counts, or the last.
    """

    required: Sequence[str]
    optional: Sequence[str] = ()
    unique: bool = False

    def lacking(self, names: Sequence[str]) -> str | None:
        """Describe a missing or repeated column of a file; None if there is none."""
        for column in self.required:
            if column not in names and column.split(".")[0] not in names:
                return f"no column {column!r} among {shorten(', '.join(map(repr, names)) or 'none', _LETTERS)}"
            if self.unique and list(names).count(column) > 1:
                return f"two columns are called {column!r}"
        return None


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        id, altered: see `Row`.
        text: unchanged.
        fields: values of its source's fields, unchanged; see clean/fields.py.
        words: a segmenter's words, if the source names a column; see words.py.
    """

    id: str
    text: str
    altered: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    words: Words | None = None


@dataclass(frozen=True)
class Span:
    """A file or a part of one, read by one call of a reader.

    Attributes:
        source: its key under `sources`.
        path: the file; None without one (the topics of the standard library, a hub dataset).
        begin, end: bytes of a JSONL file, row groups of a Parquet file, number and count of a hub dataset's part; end
            None: the end of the file.
        size: bytes to be read, an estimate.
        state: size and time of the whole file in bytes and nanoseconds, to detect a change; None without a file.
    """

    source: str
    path: str | None
    begin: int = 0
    end: int | None = None
    size: int = 0
    state: tuple[int, int] | None = None

    @property
    def file(self) -> Path:
        assert self.path is not None
        return Path(self.path)


@dataclass(frozen=True)
class LeftOut:
    """An item that could not become a document, or a document that is not written.

    Attributes:
        id: as Document.id.
        reason: one of a few words, counted in the report.
        detail: the fault, with value and place.
        damaged: True if it is faulty; otherwise it is only unwanted, and `on_error` does not apply.
        rest: True if it is the rest of a file or span, and not one document.
    """

    id: str
    reason: str
    detail: str
    damaged: bool = True
    rest: bool = False


def unreadable(id: str, error: Exception) -> LeftOut:
    """Return an item for a file, or the rest of one, that cannot be read."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return LeftOut(id, "unreadable", f"cannot be read ({' '.join(str(words).split())})", rest=True)


def no_column(id: str, problem: str) -> LeftOut:
    """Return an item for a file without a required column."""
    return LeftOut(id, "no_text", problem, rest=True)


def no_lines(file: Path) -> LeftOut:
    """Return an item for a file without a single document."""
    return LeftOut(str(file), "empty", "a file without any document")


class Decoded(NamedTuple):
    """Decoded text, and the change made on decoding, if any."""

    text: str
    altered: str | None = None


def decode(id: str, raw: bytes, offset: int = 0, encoding: str = UTF_8, in_utf_8: bool = False) -> Decoded | LeftOut:
    """Decode bytes, without a byte order mark; `altered` names the encoding if it was not UTF-8.

    Args:
        id: of the row.
        raw: its bytes.
        offset: of the bytes in the file.
        encoding: as `SourceConfig.encoding`; a named one applies to bytes that are not UTF-8.
        in_utf_8: True if the file surely is UTF-8; then one character is enough evidence.
    """
    codec = (guess(raw) or UTF_8) if encoding == AUTO else codec_of(encoding, raw)
    if codec != UTF_8 and encoding != AUTO and is_ascii_based(encoding):
        codec = UTF_8 if is_surely_utf_8(raw, 1 if in_utf_8 else SURE) else codec
    name = family(codec)
    reason = "not_utf8" if codec == UTF_8 else f"not_{name.replace('-', '_')}"
    try:
        text = raw.decode(codec)
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        shown = "UTF-8" if codec == UTF_8 else name
        return LeftOut(id, reason, f"not {shown}: byte 0x{raw[at]:02x} at offset {offset + at}")
    if codec != UTF_8:
        return Decoded(text.removeprefix("\ufeff"), decoded_as(codec))
    return Decoded(text[1:], BYTE_ORDER_MARK) if text.startswith("\ufeff") else Decoded(text)


def decoded_as(codec: str) -> str:
    """Return the reason that the report counts for text in another encoding."""
    return f"decoded_{family(codec).replace('-', '_')}"


def take_text(row: Row, source: SourceConfig) -> Document | LeftOut:
    """Return the text of a row and its fields, by the columns of a source."""
    text_field = text_field_of(source)
    text = value_of(row.fields, text_field)
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
    fields = {**take_fields(row.fields, source), **source.fixed_fields} if source.fields else source.fixed_fields
    if source.words_field is None:
        return Document(row.id, text, altered, fields)
    words = words_of(value_of(row.fields, source.words_field))
    if words is None:
        return LeftOut(row.id, "no_words", f"field {source.words_field!r} holds neither a list of words nor a text")
    if (other := differs(words, text)) is not None:
        return LeftOut(row.id, "other_words", f"field {source.words_field!r} does not spell the text: {other}")
    return Document(row.id, text, row.altered, fields, words)


def lacking_field(fields: Mapping[str, Any], column: str) -> str | None:
    """Describe a missing column of a row; None if it exists, or at least its first part."""
    if column in fields or column.split(".")[0] in fields:
        return None
    return f"no field {column!r} among {shorten(', '.join(map(repr, fields)) or 'none', _LETTERS)}"


def columns_of(source: SourceConfig) -> Columns:
    """Return the columns that the documents of a source need."""
    optional = (*source.fields.values(), *filter(None, [source.words_field]))
    return Columns((text_field_of(source),), optional)


def text_field_of(source: SourceConfig) -> str:
    return source.text_field or "text"


def take_fields(row: Mapping[str, Any], source: SourceConfig) -> dict[str, Any]:
    """Return the values of a source's fields in a row."""
    found = {name: value_of(row, column) for name, column in source.fields.items()}
    return {name: value for name, value in found.items() if value is not None}


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; a dotted name that is not a column is a path through objects."""
    value: Any = row
    for key in (column,) if column in row else column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
