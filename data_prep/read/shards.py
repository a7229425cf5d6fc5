"""Text in MDS shards, as Streaming and llm-foundry write it; a shard says itself which columns it has.

Only the columns of the text and of the fields are decoded, and of the latter only plain ones, so that nothing runs that
whoever wrote the shards has put beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.read.items import Document, LeftOut, Span, decode, no_text, take_fields, text_field_of
from modernbert_train.config.tools.prepare import SourceConfig

_TEXT = ("str", "bytes")
_SIZES = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
_NUMBERS = {"int": np.dtype(np.int64)} | {
    f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind, sizes in _SIZES.items() for bits in sizes
}


def without_unpacked(files: list[Path]) -> list[Path]:
    """Shards, of each once: not the plain form of one that lies compressed beside it."""
    packed = {file.with_suffix("") for file in files if file.suffix != ".mds"}
    return [file for file in files if file not in packed]


def read_mds(span: Span, source: SourceConfig, max_characters: int) -> Iterator[Document | LeftOut]:
    """Yield the documents of a shard, which is held in memory; their fields are columns of text, numbers or JSON."""
    from modernbert_train.data.shard_file import ColumnPlace, open_alone  # imports streaming and torch

    shard, header = open_alone(span.file.name, span.file.read_bytes())
    names = dict(zip(header["column_names"], header["column_encodings"], strict=True))
    if names.get(text_field_of(source)) not in _TEXT:
        found = [f"{name} ({encoding})" for name, encoding in names.items()]
        yield no_text(f"{span.path}: all documents", source, found, "; it must hold text (str or bytes)")
        return
    place = ColumnPlace(header, text_field_of(source))
    wanted = {c for column in source.fields.values() for c in (column, column.split(".")[0]) if _is_plain(names.get(c))}
    beside = {column: ColumnPlace(header, column) for column in wanted}
    for number in range(1, len(shard.offsets)):
        sample = shard.sample(number - 1)
        document = decode(f"{span.path}:{number}", bytes(place.value(sample)))
        if beside and isinstance(document, Document):
            row = {column: _plain(each.encoding, bytes(each.value(sample))) for column, each in beside.items()}
            document = replace(document, fields=take_fields(row, source))
        yield document


def _is_plain(encoding: str | None) -> bool:
    return encoding in ("str", "json") or encoding in _NUMBERS


def _plain(encoding: str, value: bytes) -> Any:
    if encoding in _NUMBERS:
        return np.frombuffer(value, _NUMBERS[encoding], 1)[0].item()
    return json.loads(value) if encoding == "json" else value.decode("utf-8", "replace")
