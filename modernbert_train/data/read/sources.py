"""Rows of a source: its spans, and one reader for each kind of file.

Every reader yields its rows in a fixed order, and unreadable ones as `LeftOut`; later steps decide about each row. A
file can be read in spans, so that several processes can share a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.core.files import PACKED
from modernbert_train.data.read.conll import read_conll
from modernbert_train.data.read.delimited import read_csv
from modernbert_train.data.read.encodings import UTF_8
from modernbert_train.data.read.fasta import read_fasta
from modernbert_train.data.read.find_files import file_state, source_files
from modernbert_train.data.read.hub import hub_shards, read_hub
from modernbert_train.data.read.jsonl import read_jsonl
from modernbert_train.data.read.lines import read_lines
from modernbert_train.data.read.mds_text import read_mds
from modernbert_train.data.read.parquet import read_parquet
from modernbert_train.data.read.rows import TEXT, Columns, LeftOut, Row, Span, decode, unreadable
from modernbert_train.data.read.unpacked import open_unpacked
from modernbert_train.errors import DataError

_TOPICS_BYTES = 700_000  # the topics of help() in Python 3.11
_UNKNOWN_BYTES = 1 << 20  # assumed size of a part of a hub dataset that is not on this disk


def whole_spans(name: str, source: RowSourceConfig) -> Iterator[Span]:
    """Yield the spans of a source when no file is cut, in the order of reading.

    Raises:
        ConfigError, DataError: as `source_files`, and as `hub_shards`.
    """
    files = source_files(name, source)
    states = [file_state(file) for file in files]
    if source.kind == "hub":
        shards = hub_shards(name, source)
        size = sum(size for size, _ in states) // shards or _UNKNOWN_BYTES
        yield from (Span(name, None, shard, shards, size) for shard in range(shards))
        return
    for file, state in zip(files, states, strict=True):
        yield Span(name, str(file), size=max(state[0], 0), state=state)
    if source.kind == "python_stdlib":
        yield Span(name, None, size=_TOPICS_BYTES)


def read_rows(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the rows of a span, in a fixed order.

    Args:
        span: of `source`.
        source: its configuration.
        columns: columns to read.
        max_characters: a longer text is not read into memory.

    Raises:
        DataError: a hub dataset fails at any row.
    """
    where = f"all of {span.path}"
    try:
        for item in _rows(span, source, columns, max_characters):
            where = f"all after {item.id}"
            yield item
    except DataError:
        raise
    except Exception as error:  # from disks, codecs and decompressors; the rest of the span is lost
        yield unreadable(where, error)


def _rows(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    if source.kind == "hub":
        yield from read_hub(span, source)
    elif span.path is None:
        from pydoc_data.topics import topics

        yield from (Row(f"pydoc_data.topics:{topic}", {TEXT: topics[topic]}) for topic in sorted(topics))
    else:
        yield from _READERS.get(source.kind, _read_text)(span, source, columns, max_characters)


def _read_text(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    id, size = str(span.file), span.file.stat().st_size
    max_bytes, raw = 4 * max_characters, b""  # no encoding needs more bytes a character
    if span.file.suffix in PACKED or size <= max_bytes:
        with open_unpacked(span.file) as content:
            raw = content.read(max_bytes + 1)
        size = len(raw)
    if size > max_bytes:
        yield LeftOut(id, "too_long", f"{size} bytes are more than max_characters={max_characters} characters")
    elif source.encoding == UTF_8 and b"\0" in raw:  # before decoding, for a better message about UTF-16
        yield LeftOut(id, "nul_byte", f"NUL byte at offset {raw.index(0)}, so this is not UTF-8 text")
    else:
        decoded = decode(id, raw, encoding=source.encoding)
        yield decoded if isinstance(decoded, LeftOut) else Row(id, {TEXT: decoded.text}, decoded.altered)


# kind -> reader of a file, or of a part of one; other kinds are text
_READERS: dict[str, Callable[[Span, RowSourceConfig, Columns, int], Iterator[Row | LeftOut]]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "csv": read_csv,
    "tsv": read_csv,
    "mds": read_mds,
    "fasta": read_fasta,
    "lines": read_lines,
    "conll": read_conll,
}
