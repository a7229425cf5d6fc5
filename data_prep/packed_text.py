"""Estimate the bytes of text per byte of compressed files from their beginnings."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from data_prep.read.documents import Document, read_span
from modernbert_train.config.tools.prepare import PrepareConfig, SourceConfig
from modernbert_train.core.files import ending
from modernbert_train.data.read.rows import TEXT, Span
from modernbert_train.data.read.unpacked import open_unpacked

_BEGIN_BYTES = 1 << 20, 1 << 22  # of a compressed file, minimum and maximum; beginnings are compressed less tightly
_ALL_BYTES = 24 << 20  # of all files
_BLOCK_BYTES = 1 << 18


def text_in_packed(files: Sequence[Path], source: SourceConfig) -> float:
    """Return the bytes of text per byte of compressed files; 1 if they cannot be measured."""
    packed = text = 0
    min_bytes, max_bytes = _BEGIN_BYTES
    size = min(max_bytes, max(min_bytes, _ALL_BYTES // max(1, len(files))))
    for file in files:
        with suppress(OSError, EOFError, ValueError), tempfile.TemporaryDirectory() as folder:
            begin = Path(folder, f"begin{file.suffix}")
            with file.open("rb") as packed_file:
                packed += begin.write_bytes(packed_file.read(size))
            with open_unpacked(begin) as content:
                text += _text_of(_until_cut(content), source, Path(folder, f"plain{ending(file)}"))
    return text / packed if packed and text else 1.0


def _until_cut(content: BinaryIO) -> bytes:
    """Read a file that was cut within a block, as far as possible."""
    text = bytearray()
    with suppress(OSError, EOFError, ValueError):
        while block := content.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
            text += block
    return bytes(text)


def _text_of(content: bytes, source: SourceConfig, plain: Path) -> int:
    """Return the bytes of text in the beginning of a file; of a table, written to `plain` to be read."""
    if source.kind == TEXT:
        return len(content)
    plain.write_bytes(content)
    items = read_span(Span("", str(plain)), source, PrepareConfig.max_characters)
    return sum(len(item.text.encode("utf-8", "replace")) for item in items if isinstance(item, Document))
