"""Estimate the bytes of text per byte of compressed files from their beginnings."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from modernbert_train.config.tools.prepare import SourceConfig
from modernbert_train.data.read.unpacked import open_unpacked

_BEGIN_BYTES = 1 << 20, 1 << 22  # of a compressed file, minimum and maximum; beginnings are compressed less tightly
_ALL_BYTES = 24 << 20  # of all files
_BLOCK_BYTES = 1 << 18


def text_in_packed(files: Sequence[Path], source: SourceConfig) -> float:
    """Return the bytes of text per byte of compressed files; 1 if they cannot be measured."""
    packed = text = 0.0
    least, most = _BEGIN_BYTES
    size = min(most, max(least, _ALL_BYTES // max(1, len(files))))
    for file in files:
        with suppress(OSError, EOFError, ValueError), tempfile.NamedTemporaryFile(suffix=file.suffix) as begin:
            with file.open("rb") as whole:
                packed += begin.write(whole.read(size))
            begin.flush()
            with open_unpacked(Path(begin.name)) as content:
                text += _text_of(_until_cut(content), source)
    return text / packed if packed and text else 1.0


def _until_cut(content: BinaryIO) -> bytes:
    """Read a file that was cut within a block, as far as possible."""
    found = bytearray()
    with suppress(OSError, EOFError, ValueError):
        while block := content.read1(_BLOCK_BYTES):  # type: ignore[attr-defined]
            found += block
    return bytes(found)


def _text_of(content: bytes, source: SourceConfig) -> float:
    """Return the bytes of text in the beginning of a file; for JSON, extrapolated from the whole lines."""
    lines = content.splitlines(keepends=True)[:-1]
    if source.kind != "jsonl" or not lines:
        return len(content)
    keys = (source.text_field or "text").split(".")
    return len(content) * sum(_bytes_of(line, keys) for line in lines) / sum(map(len, lines))


def _bytes_of(line: bytes, keys: Sequence[str]) -> int:
    """Return the bytes of the text in a line; 0 without a text."""
    value: Any = None
    with suppress(ValueError):
        value = json.loads(line)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return len(value.encode("utf-8", "replace")) if isinstance(value, str) else 0
