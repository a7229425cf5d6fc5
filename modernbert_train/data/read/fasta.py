"""FASTA: a line that begins with > names a record; the lines up to the next one hold its letters.

Lines are joined without white space. Letters stay as they are, lower case (soft-masked) too. A record belongs to the
span in which its header begins, so a plain file can be cut at any byte.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.text import shorten
from modernbert_train.data.read.jsonl import first_line, skip_line
from modernbert_train.data.read.rows import Columns, LeftOut, Row, Span, decode, no_lines
from modernbert_train.data.read.unpacked import BLOCK_BYTES, open_unpacked

_NAME = 100  # characters of a record's name in its id
_SHOWN = 20  # bytes of a line in a message


def read_fasta(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the records whose headers begin in a span; only a plain file is read from the middle."""
    record: _Record | None = None
    with open_unpacked(span.file) as content:
        begin = first_line(content, span.begin) if span.begin else 0
        for at, line in _lines(content, begin):
            if line.startswith(b">"):
                if record is not None:
                    yield from record.end()
                if span.end is not None and at >= span.end:
                    return
                record = _Record(span, line, source.part_letters, max_characters)
            elif record is not None:
                yield from record.add(line)
            elif span.begin == 0 and line.strip():
                detail = f"no FASTA: it begins with {line[:_SHOWN]!r} and not with >; correct the kind, or the file"
                yield LeftOut(str(span.file), "not_fasta", detail, rest=True)
                return
    if record is not None:
        yield from record.end()
    elif span.begin == 0:
        yield no_lines(span.file)


class _Record:
    """One record while its lines are read.

    Args:
        span: of the file.
        header: its first line.
        part_letters: see `SourceConfig`.
        max_characters: a longer record that is not cut is left out, and not read into memory.
    """

    def __init__(self, span: Span, header: bytes, part_letters: int | None, max_characters: int) -> None:
        name = header[1:].decode("utf-8", "replace").strip().partition(" ")[0]
        self._id = f"{span.file}: >{shorten(name, _NAME)}"
        self._part_letters, self._max_characters = part_letters, max_characters
        self._letters = bytearray()
        self._total = self._parts = 0

    def add(self, line: bytes) -> Iterator[Row | LeftOut]:
        """Take a line; yield the parts that are complete."""
        letters = b"".join(line.split())
        self._total += len(letters)
        if self._part_letters is None:
            self._letters += letters if self._total <= self._max_characters else b""
            return
        self._letters += letters
        while len(self._letters) > self._part_letters:
            yield self._part(self._part_letters)

    def end(self) -> Iterator[Row | LeftOut]:
        """Yield the last part of a record, or why the record is left out."""
        if not self._total:
            yield LeftOut(self._id, "no_sequence", "a record without letters")
        elif self._part_letters is None and self._total > self._max_characters:
            detail = f"{self._total} letters, max_characters={self._max_characters}; part_letters of its source cuts it"
            yield LeftOut(self._id, "too_long", detail)
        else:
            yield self._part(len(self._letters))

    def _part(self, letters: int) -> Row | LeftOut:
        self._parts += 1
        text = bytes(self._letters[:letters])
        del self._letters[:letters]
        is_whole = len(text) == self._total
        id = self._id if is_whole else f"{self._id}, part {self._parts}"
        decoded = decode(id, text)
        return decoded if isinstance(decoded, LeftOut) else Row(id, {"text": decoded.text}, decoded.altered)


def _lines(content: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their offsets; a long line in pieces, of a long header only the first piece."""
    while line := content.readline(BLOCK_BYTES):
        size = len(line)
        if offset == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.startswith(b">") and not line.endswith(b"\n"):
            size += skip_line(content)
        yield offset, line
        offset += size
