"""Items that all readers of files give: documents, and what should have been one. Shared by the readers of all kinds
of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_prep.read.encodings import AUTO, UTF_8, codec_of, family, guess, is_ascii_based, is_surely_utf_8
from modernbert_train.text import shorten

BYTE_ORDER_MARK = "byte_order_mark"
_LETTERS = 300  # of the names of columns
NO_FIELDS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        id: its file, with the line, row or byte where a file holds several.
        text: as it stands in the file.
        altered: what was changed on reading, in a word that the report counts; None if nothing was.
        fields: those of its source's fields that it has, as they stand there; see clean/fields.py.
    """

    id: str
    text: str
    altered: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LeftOut:
    """Something that should have been a document, or a document that is not to be written.

    Attributes:
        id: as Document.id.
        reason: one of a few words, counted in the report.
        detail: what is wrong, with its value and its place.
        damaged: whether something is wrong with it; else it is only not wanted, and `on_error` does not ask for it.
        rest: whether it is the rest of a file, or of the part of one that is read, and not one document.
    """

    id: str
    reason: str
    detail: str
    damaged: bool = True
    rest: bool = False


def unreadable(id: str, error: Exception) -> LeftOut:
    """A file, or the rest of one, that cannot be read."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return LeftOut(id, "unreadable", f"cannot be read ({' '.join(str(words).split())})", rest=True)


def no_text(id: str, text_field: str, found: Iterable[str], hint: str = "") -> LeftOut:
    """A file without the column that holds the text, with those that it has."""
    names = ", ".join(map(repr, found)) or "none"
    return LeftOut(id, "no_text", f"no column {text_field!r} among {shorten(names, _LETTERS)}{hint}", rest=True)


def no_lines(file: Path) -> LeftOut:
    """A file in which no document stands, though it should hold several."""
    return LeftOut(str(file), "empty", "a file without any document")


def decode(id: str, raw: bytes, offset: int = 0, encoding: str = UTF_8) -> Document | LeftOut:
    """Bytes as text, without a byte order mark; what was assumed of another encoding than UTF-8 is said in `altered`.

    Args:
        id: of the document.
        raw: its bytes.
        offset: where they begin in the file.
        encoding: as `SourceConfig.encoding`.
    """
    codec = (guess(raw) or UTF_8) if encoding == AUTO else codec_of(encoding, raw)
    name = family(codec)
    reason = "not_utf8" if codec == UTF_8 else f"not_{name.replace('-', '_')}"
    if codec != UTF_8 and encoding != AUTO and is_ascii_based(encoding) and is_surely_utf_8(raw):
        return LeftOut(id, reason, f"not {name}: it is UTF-8")
    try:
        text = raw.decode(codec)
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        shown = "UTF-8" if codec == UTF_8 else name
        return LeftOut(id, reason, f"not {shown}: byte 0x{raw[at]:02x} at offset {offset + at}")
    if codec != UTF_8:
        return Document(id, text.removeprefix("\ufeff"), decoded_as(codec))
    return Document(id, text[1:], BYTE_ORDER_MARK) if text.startswith("\ufeff") else Document(id, text)


def decoded_as(codec: str) -> str:
    """What the report counts of text that was not UTF-8."""
    return f"decoded_{family(codec).replace('-', '_')}"


def take_text(
    id: str,
    row: dict[str, Any],
    text_field: str,
    altered: str | None = None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> Document | LeftOut:
    """The text of a row of any format, and its fields, by the columns that `fields` names."""
    text = _value(row, text_field)
    if text is None and text_field not in row and text_field.split(".")[0] not in row:
        names = shorten(", ".join(map(repr, row)) or "none", _LETTERS)
        return LeftOut(id, "no_text", f"no field {text_field!r} among {names}")
    if not isinstance(text, str):
        return LeftOut(id, "no_text", f"field {text_field!r} is {'null' if text is None else type(text).__name__}")
    return Document(id, text, altered, take_fields(row, fields))


def take_fields(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Those fields that a row has; a column with dots that is none is a way through objects."""
    found = {}
    for name, column in fields.items():
        if (value := _value(row, column)) is not None:
            found[name] = value
    return found


def _value(row: Mapping[str, Any], column: str) -> Any:
    value: Any = row
    for key in (column,) if column in row else column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
