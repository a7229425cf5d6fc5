"""Open files of text, plain or compressed. Refuses pipes and devices, and bounds the unpacked size."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from modernbert_train.core.files import values_as
from modernbert_train.core.read_json import open_file
from modernbert_train.core.text import first_line

BLOCK_BYTES = 1 << 17  # small, because a block of repetitions decompresses to thousands of times its size
DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # raised by decompressors, besides OSError
_MAX_RATIO = 1000  # unpacked bytes per packed byte; text has 3 to 20, logs up to 100
_FREE_BYTES = 1 << 28  # unpacked size up to which any ratio is accepted
_WINDOW = 1 << 31  # bytes, as `zstd --long=31` uses; memory is only taken as data fills it


@contextmanager
def open_unpacked(file: Path) -> Iterator[BinaryIO]:
    """Open a file and yield its bytes, decompressed.

    Raises:
        OSError: it cannot be read, or is a pipe or a device.
        DAMAGED, ValueError: while it is read; it is cut short or damaged, or unpacks to too much.
    """
    with open_file(file) as raw:
        blocks = _UNPACKERS.get(file.suffix)
        if blocks is None:
            yield raw  # type: ignore[misc]
        else:
            limit = unpacked_limit(os.fstat(raw.fileno()).st_size)
            with as_file(_bounded(blocks(raw), limit)) as content:  # type: ignore[arg-type]
                yield content


def as_file(blocks: Iterator[bytes]) -> io.BufferedReader:
    """Return a readable file from blocks of bytes."""
    return io.BufferedReader(_Blocks(blocks), BLOCK_BYTES)


def unpacked_limit(size: int) -> int:
    """Return the bytes that a file of `size` bytes may unpack to."""
    return _FREE_BYTES + _MAX_RATIO * size


def unpacks_to_too_much(limit: int) -> ValueError:
    """Return the error of a file that unpacks to more than `limit` bytes."""
    return ValueError(
        f"unpacks to more than {limit:,} bytes, over {_MAX_RATIO:,} times its size, as text does not. If it is meant "
        "so, unpack it and name the plain file, or write .parquet as .jsonl"
    )


def _bounded(blocks: Iterator[bytes], limit: int) -> Iterator[bytes]:
    size = 0
    for block in blocks:
        size += len(block)
        if size > limit:
            raise unpacks_to_too_much(limit)
        yield block


class _Blocks(io.RawIOBase):
    """A raw file over blocks."""

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


def _by(opener: Callable[[BinaryIO], Any]) -> Callable[[BinaryIO], Iterator[bytes]]:
    def blocks(raw: BinaryIO) -> Iterator[bytes]:
        with opener(raw) as content:
            while block := content.read1():  # read() would lose bytes before a damaged one
                yield block

    return blocks


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """Yield frame after frame; zstandard's own reader ends quietly where a truncated file ends."""
    import zstandard

    decoder = None
    while block := raw.read(BLOCK_BYTES):
        while block:
            decoder = decoder or zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
            with values_as(EOFError, "damaged zstd data", zstandard.ZstdError):
                read = decoder.decompress(block)
            yield read
            block = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("the file ends within a zstd frame; it was cut short")


_UNPACKERS: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": _by(gzip.open),
    ".bz2": _by(bz2.open),
    ".xz": _by(lzma.open),
    ".zst": _zstd_blocks,
    ".zstd": _zstd_blocks,
}


def damage(error: Exception) -> str:
    """Describe the error of a decompressor."""
    return f"damaged or cut short ({first_line(error)}). Restore it."
