"""index.json of a folder of MDS shards: checked once as a whole, and read again entry by entry.

A corpus of two trillion tokens has a quarter of a million shards. Their entries as objects are three quarters of a
gigabyte in every process; here each stays what it is, a place in the file, which all processes of a machine share, and
one of them reads it for all (see distributed/read_per_node.py). Without torch: a plan reads it too.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.core.read_json import array_in, is_count, open_file, parse_json, require_utf8
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
        try:
            self._content = _mapped(path)
            require_utf8(self._content)
            numbers = array("q")
            for each in array_in(self._content, "shards"):
                numbers.extend(self._row(*each))
        except FileNotFoundError:
            raise DataError(f"{path}: no such file, so there are no shards in this folder. {REMEDY}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not a readable MDS index ({type(error).__name__}: {error}). {REMEDY}") from None
        found = np.array(numbers, np.int64).reshape(-1, 4)
        if not len(found):
            raise DataError(f"{path}: lists no shards. {REMEDY}")
        self._places = found[:, :2].astype(np.uint32)  # MOST_BYTES fit into it
        self.documents, self.bytes = found[:, 2].copy(), found[:, 3].copy()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, shard: Any) -> Any:
        begin, end = self._places[shard].tolist()
        return parse_json(self._content[begin:end])

    def __getstate__(self) -> dict[str, Any]:
        """For another process of this machine, which has the file as well."""
        return {name: value for name, value in self.__dict__.items() if name != "_content"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._content = _mapped(self._path)

    def _row(self, begin: int, end: int, shard: dict[str, Any]) -> tuple[int, int, int, int]:
        """Where an entry stands, and its two numbers, once nothing is wrong with it."""
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
        return begin, end, shard["samples"], file["bytes"]

    def _add_kind(self, format: str, names: tuple[str, ...], encodings: tuple[str, ...]) -> None:
        if format != "mds":
            raise DataError(f"{self._path}: {format!r} and not mds is the format of a shard. {REMEDY}")
        if "pkl" in encodings:
            raise DataError(f"{self._path}: a column is pickled, and unpickling runs code. {REMEDY}")
        self._kinds.add((format, names, encodings))
        self.columns.add(names)


def _mapped(path: Path) -> mmap.mmap:
    """Raises OSError, or ValueError where it is empty or too large."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 < size <= MOST_BYTES:
            raise ValueError("empty" if size == 0 else f"larger than {MOST_BYTES:,} bytes")
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def is_inside(name: object, *, nested: bool) -> bool:
    """Whether an index names a file of its own folder by this, or `nested` of a folder below it."""
    if not isinstance(name, str) or "\0" in name:
        return False
    if "/" not in name:
        return name not in _NO_FILES
    return nested and _NO_FILES.isdisjoint(name.split("/"))
