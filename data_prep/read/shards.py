"""Text in MDS shards, as Streaming and llm-foundry write it; a shard says itself which columns it has.

Only the columns of the text and of the fields are decoded, and of the latter only plain ones, so that nothing runs that
whoever wrote the shards has put beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.read.items import NO_FIELDS, Document, LeftOut, decode, no_text, take_fields

_TEXT = ("str", "bytes")
_NUMBERS = {"int": np.dtype(np.int64)} | {
    name: np.dtype(name)
    for name in (
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
    )
}


def without_unpacked(files: list[Path]) -> list[Path]:
    """Shards, of each once: not the plain form of one that lies compressed beside it."""
    packed = {file.with_suffix("") for file in files if file.suffix != ".mds"}
    return [file for file in files if file not in packed]


def read_mds(file: Path, text_field: str, fields: Mapping[str, str] = NO_FIELDS) -> Iterator[Document | LeftOut]:
    """Yield the documents of a shard, which is held in memory; their fields are columns of text, numbers or JSON."""
    from modernbert_train.data.shard_file import ColumnPlace, open_alone  # imports streaming and torch

    shard, header = open_alone(file.name, file.read_bytes())
    names = dict(zip(header["column_names"], header["column_encodings"], strict=True))
    if names.get(text_field) not in _TEXT:
        found = [f"{name} ({encoding})" for name, encoding in names.items()]
        yield no_text(f"{file}: all documents", text_field, found, "; it must hold text (str or bytes)")
        return
    place = ColumnPlace(header, text_field)
    wanted = {c for column in fields.values() for c in (column, column.split(".")[0]) if _is_plain(names.get(c))}
    beside = {column: ColumnPlace(header, column) for column in wanted}
    for number in range(1, len(shard.offsets)):
        sample = shard.sample(number - 1)
        document = decode(f"{file}:{number}", bytes(place.value(sample)))
        if beside and isinstance(document, Document):
            row = {column: _plain(each.encoding, bytes(each.value(sample))) for column, each in beside.items()}
            document = replace(document, fields=take_fields(row, fields))
        yield document


def _is_plain(encoding: str | None) -> bool:
    return encoding in ("str", "json") or encoding in _NUMBERS


def _plain(encoding: str, value: bytes) -> Any:
    if encoding in _NUMBERS:
        return np.frombuffer(value, _NUMBERS[encoding], 1)[0].item()
    return json.loads(value) if encoding == "json" else value.decode("utf-8", "replace")
