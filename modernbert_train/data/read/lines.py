"""Lines of text, each a row."""

from __future__ import annotations

import io
from collections.abc import Iterator

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.data.read.rows import TEXT, Columns, LeftOut, Row, Span
from modernbert_train.data.read.unpacked import open_unpacked

_CHARACTERS = 1 << 26  # of a line


def read_lines(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield each line without its end, also an empty one; a lone carriage return ends a line too."""
    with open_unpacked(span.file) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(_CHARACTERS), ""), start=1):
                id = f"{span.path}:{number}"
                if len(line) == _CHARACTERS:
                    yield LeftOut(id, "too_long", f"{len(line):,} characters or more", rest=True, line=number)
                    return
                yield Row(id, {TEXT: line.rstrip("\r\n")}, line=number)
        except UnicodeDecodeError:
            yield LeftOut(f"{span.path}: the rest", "not_utf8", "not UTF-8", rest=True)
