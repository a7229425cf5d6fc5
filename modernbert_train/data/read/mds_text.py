"""Text in MDS shards, as Streaming and llm-foundry write it; a shard describes its columns itself.

Only the columns of the text and of the fields are decoded, and fields only in plain types, so no code in an untrusted
shard can run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from modernbert_train.config.tools.prepare import RowSourceConfig
from modernbert_train.data.read.rows import Columns, LeftOut, Row, Span, decode, no_column

_TEXT = ("str", "bytes")
_SIZES = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
_NUMBERS = {"int": np.dtype(np.int64)} | {
    f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind, sizes in _SIZES.items() for bits in sizes
}


def read_mds(span: Span, source: RowSourceConfig, columns: Columns, max_characters: int) -> Iterator[Row | LeftOut]:
    """Yield the rows of a shard, which is held in memory; other columns than the text's are texts, numbers or JSON."""
    from modernbert_train.data.shard_file import ColumnPlace, open_alone  # imports streaming and torch

    shard, header = open_alone(span.file.name, span.file.read_bytes())
    names = dict(zip(header["column_names"], header["column_encodings"], strict=True))
    (text,) = columns.required
    if names.get(text) not in _TEXT:
        problem = Columns((text,)).lacking([f"{name} ({encoding})" for name, encoding in names.items()])
        yield no_column(f"{span.path}: all documents", f"{problem}; it must hold text (str or bytes)")
        return
    text_place = ColumnPlace(header, text)
    optional = {c for column in columns.optional for c in (column, column.split(".")[0]) if _is_plain(names.get(c))}
    others = {column: ColumnPlace(header, column) for column in optional}
    for number in range(1, len(shard.offsets)):
        sample = shard.sample(number - 1)
        decoded = decode(f"{span.path}:{number}", bytes(text_place.value(sample)))
        if isinstance(decoded, LeftOut):
            yield decoded
            continue
        row = {column: _plain(each.encoding, bytes(each.value(sample))) for column, each in others.items()}
        yield Row(f"{span.path}:{number}", row | {text: decoded.text}, decoded.altered)


def _is_plain(encoding: str | None) -> bool:
    return encoding in ("str", "json") or encoding in _NUMBERS


def _plain(encoding: str, value: bytes) -> Any:
    if encoding in _NUMBERS:
        return np.frombuffer(value, _NUMBERS[encoding], 1)[0].item()
    return json.loads(value) if encoding == "json" else value.decode("utf-8", "replace")
