"""JSONL, plain or compressed, line by line.

Read with the standard library and not with `datasets`, which gives up a whole file at the first bad line, turns text
that looks like a date into a date, and takes a truncated .zst file for a complete one. A line of a plain file belongs
to the span in which it begins, so a file can be cut at any byte.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.read.encodings import AUTO, UTF_8, codec_of, has_utf_16_mark, is_ascii_based
from data_prep.read.items import Document, LeftOut, Span, decode, decoded_as, no_lines, take_text
from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.core.files import values_as

PACKED = (".gz", ".bz2", ".xz", ".zst", ".zstd")  # compressed files, by the end of their names
_BLOCK_BYTES = 1 << 17  # small, because a block of repetitions decompresses to thousands of times its size
_ONE_A_LINE = "JSONL has one object a line: jq -c '.[]' FILE > FILE.jsonl makes it of an array"
_ESCAPED_BYTES = 12  # JSON spells a character with at most so many bytes, as \ud83d\ude00
_OTHER_FIELDS_BYTES = 1 << 24  # room for whatever else stands in a line


def read_jsonl(span: Span, source: SourceConfig, max_characters: int) -> Iterator[Document | LeftOut]:
    """Yield the documents of the lines that begin in a span; only a plain file is read from the middle.

    A line that must hold more than `max_characters` is not read into memory. The encoding `auto` is decided line by
    line, but for UTF-16, which a file's byte order mark tells. Offsets of such a file are those of its text in UTF-8.
    """
    longest = _ESCAPED_BYTES * max_characters + _OTHER_FIELDS_BYTES
    file, begin, end = span.file, span.begin, span.end
    number, offset, altered = 0, begin, None
    with open_unpacked(file) as lines:
        if begin == 0 and (codec := _whole(lines, source.encoding)) is not None:
            lines, altered = io.BufferedReader(_Blocks(_recoded(lines, codec)), _BLOCK_BYTES), decoded_as(codec)
        if begin:
            offset = _first_line(lines, begin)
        while end is None or offset < end:
            line = lines.readline(longest)
            if not line:
                if begin == number == 0:
                    yield no_lines(file)
                return
            number += 1
            id, size = f"{file}:{number}" if begin == 0 else f"{file} at byte {offset}", len(line)
            if size == longest and not line.endswith(b"\n"):
                size += _skip_line(lines)
                yield LeftOut(id, "too_long", f"a line of {size} bytes, max_characters={max_characters}")
            elif line.strip():
                yield _parse_line(id, line, offset, source, altered)
            offset += size


def sample_lines(file: Path, begin: int, size: int, source: SourceConfig) -> tuple[list[Document | LeftOut], int]:
    """What the whole lines of a plain file's bytes hold, and the bytes of those lines; no other byte is read.

    A line that is longer is left out, as is the one that the first byte lies in.
    """
    with file.open("rb") as content:
        content.seek(begin)
        block = content.read(size)
    first = block.find(b"\n") + 1 if begin else 0
    end = block.rfind(b"\n") + 1 if len(block) == size else len(block)
    items: list[Document | LeftOut] = []
    offset = begin + first
    if end <= first or (begin and not first):
        return [LeftOut(f"{file} at byte {begin}", "too_long", f"no line ends within {size} bytes")], len(block)
    for line in block[first:end].splitlines(keepends=True):
        if line.strip():
            items.append(_parse_line(f"{file} at byte {offset}", line, offset, source, None))
        offset += len(line)
    return items, end - first


def _first_line(lines: BinaryIO, begin: int) -> int:
    """Go to the first line that begins at or after `begin`; returns where that is."""
    lines.seek(begin - 1)
    return begin - 1 + _skip_line(lines)


def _skip_line(lines: BinaryIO) -> int:
    """Pass over the rest of a line without keeping it; returns its bytes."""
    size = 0
    while block := lines.readline(_BLOCK_BYTES):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _parse_line(id: str, line: bytes, offset: int, source: SourceConfig, altered: str | None) -> Document | LeftOut:
    decoded = decode(id, line, offset, UTF_8 if altered else source.encoding)
    if isinstance(decoded, LeftOut):
        return decoded
    try:
        row: Any = json.loads(decoded.text)
    except (ValueError, RecursionError) as error:
        several = f"; {_ONE_A_LINE}" if line.strip() in (b"[", b"{") else ""
        return LeftOut(id, "not_json", f"not JSON ({error}), its line begins at offset {offset}{several}")
    if not isinstance(row, dict):
        several = f"; {_ONE_A_LINE}" if isinstance(row, list) else ""
        return LeftOut(id, "not_json", f"{type(row).__name__}, not an object, at offset {offset}{several}")
    return take_text(id, row, source, altered or decoded.altered)


def can_be_cut(file: Path, encoding: str) -> bool:
    """Whether lines of a file are found from any byte of it: it is plain, and its bytes are not those of UTF-16."""
    if file.suffix in PACKED or not is_ascii_based(encoding):
        return False
    with file.open("rb") as content:
        return encoding != AUTO or not has_utf_16_mark(content.read(2))


@contextmanager
def open_unpacked(file: Path) -> Iterator[BinaryIO]:
    """Within it, the bytes of a file, decompressed."""
    with file.open("rb") as raw, _decompressed(file, raw) as content:
        yield content


def _whole(content: BinaryIO, encoding: str) -> str | None:
    """Python's name of the UTF-16 that content is in, if it is, or of another encoding whose lines are not found
    before it is decoded; nothing is read of it."""
    if encoding not in (AUTO, "utf-16"):
        return None if is_ascii_based(encoding) else encoding
    begin = content.peek(2)[:2]  # type: ignore[attr-defined]
    return codec_of("utf-16", begin) if encoding == "utf-16" or has_utf_16_mark(begin) else None


def _recoded(content: BinaryIO, codec: str) -> Iterator[bytes]:
    """Content of another encoding as UTF-8. Raises UnicodeDecodeError, a ValueError, where it is not of it."""
    decoder = codecs.getincrementaldecoder(codec)()
    while block := content.read(_BLOCK_BYTES):
        yield decoder.decode(block).encode(UTF_8)
    yield decoder.decode(b"", final=True).encode(UTF_8)


def _decompressed(file: Path, raw: BinaryIO) -> BinaryIO:
    if file.suffix == ".gz":
        return gzip.open(raw)  # type: ignore[return-value]
    if file.suffix == ".bz2":
        return bz2.open(raw)  # type: ignore[return-value]
    if file.suffix == ".xz":
        return lzma.open(raw)  # type: ignore[return-value]
    if file.suffix in (".zst", ".zstd"):
        return io.BufferedReader(_Blocks(_zstd_blocks(raw)), _BLOCK_BYTES)
    return raw


class _Blocks(io.RawIOBase):
    """A file out of blocks that come one after the other."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = memoryview(block)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


_WINDOW = 1 << 31  # bytes, as `zstd --long=31` has; memory is taken as far as data fill it


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """Frame after frame; zstandard's own reader ends quietly where a truncated file ends."""
    import zstandard

    decoder = None
    while block := raw.read(_BLOCK_BYTES):
        while block:
            decoder = decoder or zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            with values_as(EOFError, "damaged zstd data", zstandard.ZstdError):
                read = decoder.decompress(block)
            yield read
            block = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("the file ends within a zstd frame; it was cut short")
