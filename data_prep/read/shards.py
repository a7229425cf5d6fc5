"""Text in MDS shards, as Streaming and llm-foundry write it; a shard says itself which columns it has.

Only the column of the text is decoded, so that nothing runs that whoever wrote the shards has put beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_prep.read.items import Document, LeftOut, decode, unreadable

_TEXT = ("str", "bytes")


def without_unpacked(files: list[Path]) -> list[Path]:
    """Shards, of each once: not the plain form of one that lies compressed beside it."""
    packed = {file.with_suffix("") for file in files if file.suffix != ".mds"}
    return [file for file in files if file not in packed]


def read_mds(file: Path, text_field: str) -> Iterator[Document | LeftOut]:
    """Yield the documents of a shard, which is held in memory."""
    from modernbert_train.data.shard_file import ColumnPlace, open_alone  # imports streaming and torch

    number = 0
    try:
        shard, header = open_alone(file.name, file.read_bytes())
        names = dict(zip(header["column_names"], header["column_encodings"], strict=True))
        if names.get(text_field) not in _TEXT:
            found = ", ".join(f"{name} ({encoding})" for name, encoding in names.items())
            raise ValueError(f"no column {text_field!r} of text among {found}")
        place = ColumnPlace(header, text_field)
        for number in range(1, len(shard.offsets)):
            yield decode(f"{file}:{number}", bytes(place.value(shard.sample(number - 1))))
    except Exception as error:  # whatever a decompressor raises; the rest of the shard is lost with the document
        yield unreadable(f"{file}:{number + 1} and all after it", error)
