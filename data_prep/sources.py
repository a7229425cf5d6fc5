"""Sources of text: each yields its documents in a fixed order, and what it could not read as `Damaged`.

JSONL is read line by line with the standard library and not with `datasets`, which gives up a whole file at the first
bad line, turns text that looks like a date into a date, and takes a truncated .zst file for a complete one. Parquet,
CSV and hub datasets go through `datasets` in streaming mode. Nothing here decides what happens to a document.
"""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from modernbert_train.config.prepare import GLOBS, SourceConfig
from modernbert_train.errors import ConfigError, DataError

_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """One text. `id` is its file, with the line or row where a file holds several."""

    id: str
    text: str


@dataclass(frozen=True)
class Damaged:
    """Something that should have been a document.

    Attributes:
        id: as Document.id.
        reason: one of a few words, counted in the report.
        detail: what is wrong, with its value and its place.
    """

    id: str
    reason: str
    detail: str


def source_files(name: str, source: SourceConfig) -> list[Path]:
    """The files of a source, sorted by path; none for a dataset that only the hub knows.

    Args:
        name: its key under `sources`, for messages.
        source: its configuration.

    Raises:
        ConfigError: the glob is not a pattern.
        DataError: the path does not exist, a folder of it cannot be read, or it holds no matching file.
    """
    if source.kind == "python_stdlib":
        return _stdlib_files()
    assert source.path is not None  # config.prepare.prepare_problems asks for it
    path = Path(source.path)
    if source.kind == "hub":
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    if os.path.lexists(path) and not path.is_dir():
        return [path]
    root, patterns = path, (source.glob,) if source.glob else GLOBS[source.kind]
    if not path.is_dir():
        if not any(letter in source.path for letter in "*?["):
            raise DataError(f"sources.{name}.path={source.path}: no such file or folder. Correct the path.")
        parts = path.parts
        first = next(i for i, part in enumerate(parts) if any(letter in part for letter in "*?["))
        root, patterns = Path(*parts[:first]), (str(Path(*parts[first:])),)
    for _ in os.walk(root, onerror=_refuse_folder):  # Path.glob passes over folders that it may not read
        pass
    try:
        files = sorted({file for pattern in patterns for file in root.glob(pattern) if not file.is_dir()})
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"sources.{name}: {' or '.join(patterns)} is not a pattern ({error}). Write one like **/*.txt, relative to "
            "the folder."
        ) from None
    if not files:
        raise DataError(
            f"sources.{name}: no file in {root} matches {' or '.join(patterns)}. Correct sources.{name}.path, "
            f"or set sources.{name}.glob to a pattern of your files."
        )
    return files


def read_source(name: str, source: SourceConfig, max_characters: int) -> Iterator[Document | Damaged]:
    """Yield the documents of a source in a fixed order: sorted files, and within a file as they stand.

    Args:
        name: its key under `sources`.
        source: its configuration.
        max_characters: text files that must be longer are not read into memory.

    Raises:
        ConfigError, DataError: as `source_files`; DataError also when a hub dataset fails at any row.
    """
    files = source_files(name, source)
    if source.kind == "hub":
        yield from _read_hub(name, source)
        return
    for file in files:
        if source.kind in ("python_stdlib", "text"):
            yield _read_text(file, max_characters)
        elif source.kind == "jsonl":
            yield from _read_jsonl(file, source.text_field or "text")
        else:
            yield from _read_table(source.kind, file, source.text_field or "text")
    if source.kind == "python_stdlib":
        from pydoc_data.topics import topics

        yield from (Document(f"pydoc_data.topics:{topic}", topics[topic]) for topic in sorted(topics))


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    topics = root / "pydoc_data" / "topics.py"  # its topics are documents of their own
    return sorted(
        file for file in root.rglob("*.py") if not _NOT_STDLIB & set(file.relative_to(root).parts) and file != topics
    )


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"{error.filename}: {error.strerror}. Make the folder readable, or leave it out of the glob.")


def _unreadable(id: str, error: Exception) -> Damaged:
    words = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return Damaged(id, "unreadable", f"cannot be read ({' '.join(str(words).split())})")


def _decode(id: str, raw: bytes, offset: int = 0) -> str | Damaged:
    """UTF-8 without its byte order mark; `offset` is where `raw` begins in the file."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        return Damaged(id, "not_utf8", f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start}")


def _read_text(file: Path, max_characters: int) -> Document | Damaged:
    id = str(file)
    try:
        size = file.stat().st_size
        if size > 4 * max_characters:  # UTF-8 needs at most 4 bytes a character
            return Damaged(id, "too_long", f"{size} bytes are more than max_characters={max_characters} characters")
        raw = file.read_bytes()
    except OSError as error:
        return _unreadable(id, error)
    if b"\0" in raw:  # before decoding, because UTF-16 is both and this says it better
        return Damaged(id, "nul_byte", f"NUL byte at offset {raw.index(0)}, so this is not UTF-8 text")
    text = _decode(id, raw)
    return text if isinstance(text, Damaged) else Document(id, text)


def _read_jsonl(file: Path, text_field: str) -> Iterator[Document | Damaged]:
    number = offset = 0
    try:
        with file.open("rb") as raw:
            for number, line in enumerate(_lines(file, raw), start=1):
                if line.strip():
                    yield _parse_line(f"{file}:{number}", line, offset, text_field)
                offset += len(line)
    except (OSError, EOFError, ValueError) as error:  # what gzip and our zstd reader raise on a damaged file
        yield _unreadable(f"{file}:{number + 1} and all after it", error)


def _parse_line(id: str, line: bytes, offset: int, text_field: str) -> Document | Damaged:
    decoded = _decode(id, line, offset)
    if isinstance(decoded, Damaged):
        return decoded
    try:
        row = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return Damaged(id, "not_json", f"not JSON ({error}), its line begins at offset {offset}")
    if not isinstance(row, dict):
        return Damaged(id, "not_json", f"{type(row).__name__}, not an object, at offset {offset}")
    return _take_text(id, row, text_field)


def _take_text(id: str, row: dict[str, Any], text_field: str) -> Document | Damaged:
    if text_field not in row:
        return Damaged(id, "no_text", f"no field {text_field!r} among {', '.join(map(repr, row)) or 'none'}")
    text = row[text_field]
    if not isinstance(text, str):
        return Damaged(id, "no_text", f"field {text_field!r} is {'null' if text is None else type(text).__name__}")
    return Document(id, text)


def _lines(file: Path, raw: BinaryIO) -> Iterator[bytes]:
    if file.suffix == ".gz":
        with gzip.open(raw) as lines:
            yield from lines
    elif file.suffix == ".zst":
        pending = b""
        for block in _zstd_blocks(raw):
            *whole, pending = (pending + block).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if pending:
            yield pending
    else:
        yield from raw


def _zstd_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """Decompress frame after frame; zstandard's own reader ends quietly where a truncated file ends."""
    import zstandard

    decoder = None
    while block := raw.read(_BLOCK_BYTES):
        while block:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield decoder.decompress(block)
            except zstandard.ZstdError as error:
                raise EOFError(f"damaged zstd data: {error}") from None
            block = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError("the file ends within a zstd frame; it was cut short")


def _read_table(kind: str, file: Path, text_field: str) -> Iterator[Document | Damaged]:
    import datasets  # slow to import, and needed by few

    options: dict[str, Any] = {"columns": [text_field]}
    if kind == "csv":  # as text: otherwise "007" becomes 7 and "NA" becomes null
        features = datasets.Features({text_field: datasets.Value("string")})
        options = {"usecols": [text_field], "features": features, "keep_default_na": False}
    number = 0
    try:
        rows = datasets.load_dataset(kind, data_files=[str(file)], split="train", streaming=True, **options)
        for number, row in enumerate(rows, start=1):
            yield _take_text(f"{file}:{number}", row, text_field)
    except Exception as error:  # whatever pandas and pyarrow raise; the rest of the file is lost with the row
        yield _unreadable(f"{file}:{number + 1} and all after it", error)


def _read_hub(name: str, source: SourceConfig) -> Iterator[Document | Damaged]:
    import datasets

    split = source.split or "train"
    number = 0
    try:
        for number, row in enumerate(
            datasets.load_dataset(source.path, source.subset, split=split, streaming=True), start=1
        ):
            yield _take_text(f"{source.path}/{split}:{number}", row, source.text_field or "text")
    except Exception as error:  # never skipped: a network that fails must not look like the end of the data
        raise DataError(
            f"sources.{name}.path={source.path}: row {number + 1} of split {split} cannot be read "
            f"({type(error).__name__}: {' '.join(str(error).split())}). Correct path, subset and split, or try again."
        ) from error
