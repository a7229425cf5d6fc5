"""Rows, items that are left out, and the remedy for each reason: the types that all readers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.core.text import shorten
from modernbert_train.data.read.encodings import (
    AUTO,
    SURE,
    UTF_8,
    codec_of,
    family,
    guess,
    is_ascii_based,
    is_surely_utf_8,
)

TEXT = "text"  # the only column of files without columns
BYTE_ORDER_MARK = "byte_order_mark"
_LETTERS = 300  # of column names in a message


class Row(NamedTuple):
    """A row of any format.

    Attributes:
        id: its file, with the line, row or byte if a file holds several.
        fields: the values of its columns, unchanged.
        altered: the change made on reading, as the report counts it; None without one.
        line: its line in the file, or its row in Parquet and hub datasets; 0 in the middle of a file.
    """

    id: str
    fields: Mapping[str, Any]
    altered: str | None = None
    line: int = 0

    def value(self, column: str) -> Any:
        """Return the value of a column; None without one."""
        return value_of(self.fields, column)


class Columns(NamedTuple):
    """The columns to read from a source.

    Attributes:
        required: a file without one of them is left out.
        optional: read if present.
        unique: refuse a header or an object that has one of `required` twice; else the first of a header counts, or
            the last of an object.
        strict: also refuse JSON with half a surrogate pair, a .csv that breaks its rules, and rows of other widths
            than the header.
    """

    required: Sequence[str]
    optional: Sequence[str] = ()
    unique: bool = False
    strict: bool = False

    def lacking(self, names: Sequence[str]) -> str | None:
        """Describe a missing or repeated column of a file; None if there is none."""
        for column in self.required:
            if column not in names and column.split(".")[0] not in names:
                return f"no column {column!r} among {shorten(', '.join(map(repr, names)) or 'none', _LETTERS)}"
            if self.unique and list(names).count(column) > 1:
                return f"two columns are called {column!r}; rename one of them"
        return None


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
    """An item that could not become a row or a document, or a document that is not written.

    Attributes:
        id, line: as of a row.
        reason: one of a few words, counted in the report; see REMEDIES.
        detail: the fault, with value and place.
        damaged: True if it is faulty; otherwise it is only unwanted, and `on_error` does not apply.
        rest: True if it is the rest of a file or span, and not one document.
    """

    id: str
    reason: str
    detail: str
    damaged: bool = True
    rest: bool = False
    line: int = 0


class Remedy(NamedTuple):
    """The advice for one reason.

    Attributes:
        task: for a task, which refuses the first faulty row; {keys} are the keys that name its columns.
        corpus: for a corpus, which counts faulty rows and has lost too much of the source {source}.
    """

    task: str = "Correct it, or remove it."
    corpus: str = ""


NO_ROWS, NO_COLUMN = "empty", "no_text"
HALF_PAIR = "half of a surrogate pair, which is no text"
REMEDIES: dict[str, Remedy] = {
    "unreadable": Remedy("Restore it, or correct the path."),
    "not_utf8": Remedy("Correct it, or convert a file of text: iconv -f ENCODING -t UTF-8."),
    "surrogate": Remedy(),
    "not_json": Remedy(corpus="Correct {source}.kind, if these are not lines of JSON."),
    "not_csv": Remedy(
        "Correct it; a .csv quotes texts that hold a comma or a line break, and doubles quotes in them; a .tsv holds "
        "no tabs in texts."
    ),
    NO_COLUMN: Remedy("Set {keys} to names of them."),
    "too_long": Remedy("Divide it.", "Raise max_characters, if that is one document."),
    "html": Remedy(corpus="Set {source}.strip=html to take the text between the tags, or =nothing to keep the tags."),
    **dict.fromkeys(
        ("no_words", "other_words"),
        Remedy(corpus="Set {source}.words_field to the one with the words of the same text, or segment it again."),
    ),
}


def sound_rows(items: Iterable[Row | LeftOut], keys: str) -> Iterator[Row]:
    """Yield the rows of a file in which every row must be sound.

    Args:
        items: of a reader.
        keys: configuration keys that name the columns, for messages; empty: the format fixes their names.

    Raises:
        ValueError: an item is left out; names its line, the fault and the remedy.
    """
    for item in items:
        if isinstance(item, Row):
            yield item
        elif item.reason != NO_ROWS:
            where = f"line {item.line}: " if item.line else ""
            remedy = REMEDIES.get(item.reason, Remedy()).task if keys or item.reason != NO_COLUMN else Remedy().task
            raise ValueError(f"{where}{item.detail}. {remedy.format(keys=keys)}")


def unreadable(id: str, error: Exception) -> LeftOut:
    """Return an item for a file, or the rest of one, that cannot be read."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return LeftOut(id, "unreadable", f"cannot be read ({' '.join(str(words).split())})", rest=True)


def no_column(id: str, problem: str, line: int = 0) -> LeftOut:
    """Return an item for a file without a required column."""
    return LeftOut(id, NO_COLUMN, problem, rest=True, line=line)


def no_lines(file: Path) -> LeftOut:
    """Return an item for a file without a single document."""
    return LeftOut(str(file), NO_ROWS, "a file without any document")


class Decoded(NamedTuple):
    """Decoded text, and the change made on decoding, if any."""

    text: str
    altered: str | None = None


def decode(
    id: str, raw: bytes, offset: int = 0, encoding: str = UTF_8, in_utf_8: bool = False, line: int = 0
) -> Decoded | LeftOut:
    """Decode bytes, without a byte order mark; `altered` names the encoding if it was not UTF-8.

    Args:
        id, line: of the row.
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
        return LeftOut(id, reason, f"not {shown}: byte 0x{raw[at]:02x} at offset {offset + at}", line=line)
    if codec != UTF_8:
        return Decoded(text.removeprefix("\ufeff"), decoded_as(codec))
    return Decoded(text[1:], BYTE_ORDER_MARK) if text.startswith("\ufeff") else Decoded(text)


def decoded_as(codec: str) -> str:
    """Return the reason that the report counts for text in another encoding."""
    return f"decoded_{family(codec).replace('-', '_')}"


def lacking_field(fields: Mapping[str, Any], column: str) -> str | None:
    """Describe a missing column of a row; None if it exists, or at least its first part."""
    problem = Columns((column,)).lacking([*fields])
    return problem and problem.replace("column", "field", 1)


def value_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; a dotted name that is not a column is a path through objects."""
    value: Any = row
    for key in (column,) if column in row else column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
