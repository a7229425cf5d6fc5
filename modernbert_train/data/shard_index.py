"""index.json of a folder of MDS shards: checked once as a whole, parsed entry by entry.

A corpus of two trillion tokens has a quarter of a million shards. As objects their entries take three quarters of a
gigabyte, as text a quarter of that; one process of a machine reads it for all (see distributed/read_per_node.py).
Works without torch, since plans read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import is_count, read_json
from modernbert_train.core.read_once import read_once
from modernbert_train.errors import DataError

REMEDY = "Restore it from a copy, or prepare the data again with `prepare --overwrite`."
MAX_BYTES = 1 << 29  # a shard takes about 700
_NO_FILES = frozenset(("", ".", ".."))


def stored(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry's description of the stored file: the compressed one, if any."""
    info: dict[str, Any] = shard["zip_data"] or shard["raw_data"]
    return info


def read_index(path: Path, column: str, *, nested: bool = False) -> ShardIndex:
    """Return the index of a folder of shards; an unchanged file is read once.

    Args:
        path: of the file.
        column: that every shard must have.
        nested: allow files in subfolders.

    Raises:
        DataError: it is missing, damaged, empty, or not to be trusted.
    """
    index = read_once(path, ShardIndex)
    if index.below is not None and not nested:
        raise DataError(f"{path}: names a file outside its folder: {index.below!r}. {REMEDY}")
    for columns in index.columns:
        if column not in columns:
            raise DataError(f"{path}: no MDS column {column!r} in {list(columns)}. {REMEDY}")
    return index


class ShardIndex(Sequence[dict[str, Any]]):
    """The entries of an index, in order. Raises as `read_index`, which creates it.

    Attributes:
        documents, bytes: int64 [shards], documents and stored size of each shard.
        columns: the column names that occur in shards.
        below: a file in a subfolder that the index names, or None.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.columns: set[tuple[str, ...]] = set()
        self._kinds: set[tuple[str, tuple[str, ...], tuple[str, ...]]] = set()
        self.below: str | None = None
        if not path.exists():
            raise DataError(f"{path}: no such file, so there are no shards in this folder. {REMEDY}")
        wrong = (ValueError, KeyError, TypeError, AttributeError)
        with os_errors_as(DataError, f"{path}: not a readable MDS index", REMEDY, *wrong):
            shards = list(read_json(path, MAX_BYTES)["shards"])
            rows = np.array([self._row(shard) for shard in shards], np.int64).reshape(-1, 2)
        if not shards:
            raise DataError(f"{path}: lists no shards. {REMEDY}")
        self._entries = [json.dumps(shard).encode() for shard in shards]
        self.documents, self.bytes = rows[:, 0].copy(), rows[:, 1].copy()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, shard: Any) -> Any:
        return json.loads(self._entries[shard])

    def _row(self, shard: dict[str, Any]) -> tuple[int, int]:
        """Check an entry and return its two numbers."""
        for info in (shard["raw_data"], shard["zip_data"]):
            if info is not None and not is_inside(info["basename"], nested=False):
                if not is_inside(info["basename"], nested=True):
                    raise DataError(f"{self._path}: names a file outside its folder: {info['basename']!r}. {REMEDY}")
                self.below = info["basename"]
        kind = shard["format"], tuple(shard["column_names"]), tuple(shard["column_encodings"])
        if kind not in self._kinds:  # only a few distinct ones
            self._add_kind(*kind)
        file = stored(shard)
        if not (is_count(shard["samples"]) and is_count(file["bytes"]) and dict(file["hashes"])):
            raise DataError(f"{self._path}: {file['basename']} has no size or no hash to be checked by. {REMEDY}")
        return shard["samples"], file["bytes"]

    def _add_kind(self, format: str, names: tuple[str, ...], encodings: tuple[str, ...]) -> None:
        if format != "mds":
            raise DataError(f"{self._path}: a shard has the format {format!r}, and not mds. {REMEDY}")
        if "pkl" in encodings:
            raise DataError(f"{self._path}: a column is pickled, and unpickling runs code. {REMEDY}")
        self._kinds.add((format, names, encodings))
        self.columns.add(names)


def is_inside(name: object, *, nested: bool) -> bool:
    """Return True if the name is a file in the index's folder, or with `nested` in a subfolder."""
    if not isinstance(name, str) or "\0" in name:
        return False
    if "/" not in name:
        return name not in _NO_FILES
    return nested and _NO_FILES.isdisjoint(name.split("/"))
