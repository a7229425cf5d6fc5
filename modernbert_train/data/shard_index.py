"""index.json of a folder of MDS shards: checked once as a whole, and kept entry by entry.

A corpus of two trillion tokens has a quarter of a million shards. Their entries as objects are three quarters of a
gigabyte, as text a quarter of that; one process of a machine reads it for all (see distributed/read_per_node.py).
Without torch: a plan reads it too.
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
MOST_BYTES = 1 << 29  # 700 bytes for a shard
_NO_FILES = frozenset(("", ".", ".."))


def stored(shard: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry says of a shard's file: of the compressed one if there is one."""
    info: dict[str, Any] = shard["zip_data"] or shard["raw_data"]
    return info


def read_index(path: Path, column: str, *, nested: bool = False) -> ShardIndex:
    """The index of a folder of shards; one that is as it was is not read a second time.

    Args:
        path: of the file.
        column: that every shard must have.
        nested: it may also name files in folders below its own.

    Raises:
        DataError: it is missing or damaged, lists nothing, or is not to be trusted.
    """
    index = read_once(path, ShardIndex)
    if index.below is not None and not nested:
        raise DataError(f"{path}: names a file outside its folder: {index.below!r}. {REMEDY}")
    for columns in index.columns:
        if column not in columns:
            raise DataError(f"{path}: no MDS column {column!r} in {list(columns)}. {REMEDY}")
    return index


class ShardIndex(Sequence[dict[str, Any]]):
    """The entries of an index, in order. Raises as `read_index`, which asks for one.

    Attributes:
        documents, bytes: int64 [shards], of each shard its documents, and its size as stored.
        columns: the names of the columns, as different shards have them.
        below: a file that it names in a folder below its own; None: there is none.
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
            shards = list(read_json(path, MOST_BYTES)["shards"])
            found = np.array([self._row(shard) for shard in shards], np.int64).reshape(-1, 2)
        if not shards:
            raise DataError(f"{path}: lists no shards. {REMEDY}")
        self._entries = [json.dumps(shard).encode() for shard in shards]
        self.documents, self.bytes = found[:, 0].copy(), found[:, 1].copy()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, shard: Any) -> Any:
        return json.loads(self._entries[shard])

    def _row(self, shard: dict[str, Any]) -> tuple[int, int]:
        """The two numbers of an entry, once nothing is wrong with it."""
        for info in (shard["raw_data"], shard["zip_data"]):
            if info is not None and not is_inside(info["basename"], nested=False):
                if not is_inside(info["basename"], nested=True):
                    raise DataError(f"{self._path}: names a file outside its folder: {info['basename']!r}. {REMEDY}")
                self.below = info["basename"]
        kind = shard["format"], tuple(shard["column_names"]), tuple(shard["column_encodings"])
        if kind not in self._kinds:  # there are few
            self._add_kind(*kind)
        file = stored(shard)
        if not (is_count(shard["samples"]) and is_count(file["bytes"]) and dict(file["hashes"])):
            raise DataError(f"{self._path}: {file['basename']} has no size or no hash to be checked by. {REMEDY}")
        return shard["samples"], file["bytes"]

    def _add_kind(self, format: str, names: tuple[str, ...], encodings: tuple[str, ...]) -> None:
        if format != "mds":
            raise DataError(f"{self._path}: {format!r} and not mds is the format of a shard. {REMEDY}")
        if "pkl" in encodings:
            raise DataError(f"{self._path}: a column is pickled, and unpickling runs code. {REMEDY}")
        self._kinds.add((format, names, encodings))
        self.columns.add(names)


def is_inside(name: object, *, nested: bool) -> bool:
    """Whether an index names a file of its own folder by this, or `nested` of a folder below it."""
    if not isinstance(name, str) or "\0" in name:
        return False
    if "/" not in name:
        return name not in _NO_FILES
    return nested and _NO_FILES.isdisjoint(name.split("/"))
