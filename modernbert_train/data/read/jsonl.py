"""JSONL, plain or compressed, line by line.

Read with the standard library instead of `datasets`, which drops a whole file at the first bad line, converts text that
looks like a date, and accepts a truncated .zst file as complete. A line of a plain file belongs to the span in which it
begins, so a file can be cut at any byte.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.files import PACKED
from modernbert_train.core.read_json import open_file, parse_json
from modernbert_train.data.read.encodings import (
    AUTO,
    UTF_8,
    codec_of,
    has_utf_16_mark,
    is_ascii_based,
    is_utf_8_file,
)
from modernbert_train.data.read.rows import (
    HALF_PAIR,
    Columns,
    LeftOut,
    Row,
    Span,
    decode,
    decoded_as,
    no_column,
    no_lines,
)
from modernbert_train.data.read.unpacked import BLOCK_BYTES, as_file, open_unpacked

_ONE_A_LINE = "JSONL has one object a line: jq -c '.[]' FILE > FILE.jsonl makes it of an array"
_ESCAPED_BYTES = 12  # maximum bytes of an escaped character in JSON, such as \ud83d\ude00
_OTHER_FIELDS_BYTES = 1 << 24  # allowance for the other fields of a line


def read_jsonl(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the objects of the lines that begin in a span; only a plain file is read from the middle.

    A longer line than `max_characters` allows is not read into memory. The encoding `auto` is decided line by line,
    except UTF-16, which a file's byte order mark shows. Offsets in such a file count its text in UTF-8.
    """
    longest = _ESCAPED_BYTES * max_characters + _OTHER_FIELDS_BYTES
    file, begin, end = span.file, span.begin, span.end
    number, offset, altered = 0, begin, None
    in_utf_8 = is_utf_8_file(file, source.encoding)
    with open_unpacked(file) as lines:
        if begin == 0 and (codec := _whole(lines, source.encoding)) is not None:
            lines, altered = as_file(_recoded(lines, codec)), decoded_as(codec)
        if begin:
            offset = first_line(lines, begin)
        while end is None or offset < end:
            line = lines.readline(longest)
            if not line:
                if begin == number == 0:
                    yield no_lines(file)
                return
            number += 1
            id, size = f"{file}:{number}" if begin == 0 else f"{file} at byte {offset}", len(line)
            line_number = number if begin == 0 else 0
            if size == longest and not line.endswith(b"\n"):
                size += skip_line(lines)
                detail = f"a line of {size} bytes, more than {longest} for max_characters={max_characters}"
                yield LeftOut(id, "too_long", detail, line=line_number)
            elif line.strip():
                encoding = UTF_8 if altered else source.encoding
                yield _parse_line(id, line_number, line, offset, columns, encoding, altered, in_utf_8)
            offset += size


def sample_lines(
    file: Path, begin: int, size: int, source: RowSourceConfig, columns: Columns
) -> tuple[list[Row | LeftOut], int]:
    """Read the whole lines within some bytes of a plain file; return their objects and their size.

    Longer lines are left out, and so is the line that contains the first byte.
    """
    in_utf_8 = is_utf_8_file(file, source.encoding)
    with open_file(file) as content:
        content.seek(begin)
        block = content.read(size)
    first = block.find(b"\n") + 1 if begin else 0
    end = block.rfind(b"\n") + 1 if len(block) == size else len(block)
    items: list[Row | LeftOut] = []
    offset = begin + first
    if end <= first or (begin and not first):
        return [LeftOut(f"{file} at byte {begin}", "too_long", f"no line ends within {size} bytes")], len(block)
    for line in block[first:end].splitlines(keepends=True):
        if line.strip():
            id = f"{file} at byte {offset}"
            items.append(_parse_line(id, 0, line, offset, columns, source.encoding, None, in_utf_8))
        offset += len(line)
    return items, end - first


def first_line(lines: BinaryIO, begin: int) -> int:
    """Seek to the first line that begins at or after `begin`; return its offset."""
    lines.seek(begin - 1)
    return begin - 1 + skip_line(lines)


def skip_line(lines: BinaryIO) -> int:
    """Skip the rest of a line without storing it; return its size in bytes."""
    size = 0
    while block := lines.readline(BLOCK_BYTES):
        size += len(block)
        if block.endswith(b"\n"):
            break
    return size


def _parse_line(
    id: str, number: int, line: bytes, offset: int, columns: Columns, encoding: str, altered: str | None, in_utf_8: bool
) -> Row | LeftOut:
    decoded = decode(id, line, offset, encoding, in_utf_8, number)
    if isinstance(decoded, LeftOut):
        return decoded
    row, fault = None, ""
    try:
        row = parse_json(decoded.text, twice=columns.required) if columns.unique else json.loads(decoded.text)
    except (ValueError, RecursionError) as error:
        fault = f"not JSON ({error}), its line begins at offset {offset}"
    if not isinstance(row, dict):
        several = f"; {_ONE_A_LINE}" if isinstance(row, list) or line.strip() in (b"[", b"{") else ""
        fault = fault or f"{type(row).__name__}, not an object, at offset {offset}"
        return LeftOut(id, "not_json", fault + several, line=number)
    if columns.strict:
        if has_half_pair(decoded.text, row):
            return LeftOut(id, "surrogate", HALF_PAIR, line=number)
        if problem := columns.lacking([*row]):
            return no_column(id, problem, number)
    return Row(id, row, altered or decoded.altered, number)


def has_half_pair(text: str, value: Any) -> bool:
    """Return True if JSON holds half a surrogate pair, as UTF-16 programs export it; only escapes can encode one."""
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return True
    return False


def can_be_cut(file: Path, encoding: str) -> bool:
    """Return True if lines of a file can be found from any byte: it is plain, and not UTF-16."""
    if file.suffix in PACKED or not is_ascii_based(encoding):
        return False
    with open_file(file) as content:
        return encoding != AUTO or not has_utf_16_mark(content.read(2))


def _whole(content: BinaryIO, encoding: str) -> str | None:
    """Return Python's name of an encoding that must be decoded before lines are found, such as UTF-16; else None.

    Only peeks into the content."""
    if encoding not in (AUTO, "utf-16"):
        return None if is_ascii_based(encoding) else encoding
    begin = content.peek(2)[:2]  # type: ignore[attr-defined]
    return codec_of("utf-16", begin) if encoding == "utf-16" or has_utf_16_mark(begin) else None


def _recoded(content: BinaryIO, codec: str) -> Iterator[bytes]:
    """Yield content of another encoding as UTF-8. Raises UnicodeDecodeError, a ValueError, for other content."""
    decoder = codecs.getincrementaldecoder(codec)()
    while block := content.read(BLOCK_BYTES):
        yield decoder.decode(block).encode(UTF_8)
    yield decoder.decode(b"", final=True).encode(UTF_8)
