"""The bytes of one MDS shard: verify them, find its documents, and decode a document's token ids.

A sample is the sizes of the variable-size columns, as uint32, followed by the columns. Only the column of ids is
decoded: other columns may be present (an attention mask, a name), and their writer is not trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train import import_hook
from modernbert_train.core.read_json import parse_json
from modernbert_train.data.shard_index import stored

import_hook.activate()

from streaming.base.compression import decompress  # noqa: E402
from streaming.base.format.mds.encodings import NDArray as StoredArray  # noqa: E402
from streaming.base.hashing import get_hash, is_hash  # noqa: E402

BYTES = "bytes"  # encoding of ids without their type


class ShardData(NamedTuple):
    """A shard in memory.

    Attributes:
        data: decompressed; documents are views into it, so a chunk of a long one costs nothing more.
        offsets: start of each document, and end of the last one.
    """

    data: memoryview
    offsets: NDArray[np.uint32]

    def sample(self, number: int) -> memoryview:
        """Return the bytes of a document."""
        return self.data[self.offsets[number] : self.offsets[number + 1]]


def hash_of(algorithm: str, data: bytes) -> str:
    """Hash bytes by one of Streaming's algorithms. Raises ValueError for an unknown one."""
    digest: str = get_hash(algorithm, data)
    return digest


def fault_of(shard: Mapping[str, Any], data: bytes) -> str | None:
    """Return the problem with the bytes of a shard's file by its size and its first hash, or None."""
    info = stored(shard)
    if len(data) != info["bytes"]:
        return f"has {len(data)} bytes, index.json says {info['bytes']}"
    for algorithm, expected in list(info["hashes"].items())[:1]:
        if not is_hash(algorithm):
            return f"has a hash of an unknown kind in index.json: {algorithm}"
        if (digest := hash_of(algorithm, data)) != expected:
            return f"is damaged: its {algorithm} is {digest}, index.json says {expected}"
    return None


def unpack(shard: Mapping[str, Any], data: bytes) -> ShardData:
    """Return the documents in the bytes of a shard's file. Raises any error if they do not match the index."""
    if shard["zip_data"]:
        data = decompress(shard["compression"], data)
    if len(data) != shard["raw_data"]["bytes"]:
        raise ValueError(f"unpacks to {len(data)} bytes, index.json says {shard['raw_data']['bytes']}")
    count = int(np.frombuffer(data, np.uint32, 1)[0])
    if count != shard["samples"]:
        raise ValueError(f"holds {count} documents, index.json says {shard['samples']}")
    return ShardData(memoryview(data), np.frombuffer(data, np.uint32, count + 1, offset=4))


def open_alone(name: str, data: bytes) -> tuple[ShardData, dict[str, Any]]:
    """Open a shard without an index; return its data and an entry like the index's, without names and sizes.

    Args:
        name: of its file; the suffix names the compression.
        data: its bytes.

    Raises:
        ValueError: it is not an MDS shard. Decompression raises other errors.
    """
    _, _, packed = name.rpartition(".mds")
    if packed:
        data = decompress(packed[1:], data)
    count = int(np.frombuffer(data, np.uint32, 1)[0])
    offsets = np.frombuffer(data, np.uint32, count + 1, offset=4)
    header = parse_json(bytes(memoryview(data)[8 + 4 * count : offsets[0]]))
    if not isinstance(header, dict) or header.get("format") != "mds" or offsets[-1] != len(data):
        raise ValueError("not a whole MDS shard")
    return ShardData(memoryview(data), offsets), header


class ColumnPlace:
    """Finds the bytes of one column within a document.

    Args:
        shard: its entry of the index.
        name: of the column.

    Attributes:
        encoding: of the column.

    Raises:
        ValueError: the entry lacks this column.
    """

    def __init__(self, shard: Mapping[str, Any], name: str) -> None:
        columns = list(zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True))
        self._place = [column for column, _, _ in columns].index(name)
        self._sizes = [size for _, _, size in columns]
        self._variable = sum(size is None for size in self._sizes)
        self.encoding: str = columns[self._place][1]

    def value(self, sample: memoryview) -> memoryview:
        """Return the column's bytes. Raises ValueError if they are fewer than the document declares."""
        at, size = self._span(sample)
        value = sample[at : at + size]
        if len(value) != size:
            raise ValueError(f"{size} bytes are wanted, {len(value)} are left")
        return value

    def _span(self, sample: memoryview) -> tuple[int, int]:
        if len(self._sizes) == 1 and self._variable:
            return 4, int.from_bytes(sample[:4], "little")
        variable_sizes = iter(np.frombuffer(sample, np.uint32, self._variable).tolist())
        sizes = [next(variable_sizes) if size is None else size for size in self._sizes]
        return 4 * self._variable + sum(sizes[: self._place]), sizes[self._place]


class IdColumn:
    """Decodes the ids of a document.

    Args:
        shard: its entry of the index.
        name: of the column.
        dtype: numpy name of the ids' type, for encodings that do not declare it.

    Raises:
        ValueError: the entry lacks this column, or it does not hold ids.
    """

    def __init__(self, shard: Mapping[str, Any], name: str, dtype: str | None) -> None:
        self._place = ColumnPlace(shard, name)
        kind, _, stored_as = self._place.encoding.partition(":")
        self._array = StoredArray.from_str(stored_as) if kind == "ndarray" else None
        if self._array is None and (kind != BYTES or dtype is None):
            raise ValueError(f"column {name} is {self._place.encoding}, and no array of token ids")
        self._dtype = None if dtype is None else np.dtype(dtype)

    def __call__(self, sample: memoryview) -> NDArray[Any]:
        """Return the ids as stored, of any shape; a view. Raises numpy's errors for malformed bytes."""
        value = self._place.value(sample)
        if self._array is None:
            return np.frombuffer(value, self._dtype)
        ids: NDArray[Any] = self._array.decode(value)
        return ids


def as_line(ids: NDArray[Any]) -> NDArray[Any]:
    """Flatten ids with one axis longer than 1; return others unchanged."""
    return ids.reshape(-1) if ids.ndim != 1 and ids.size and max(ids.shape) == ids.size else ids


def ends_of(ids: NDArray[Any], special: Collection[int]) -> tuple[int, int]:
    """Return the start and end of a document without the special ids around it."""
    start, end = 0, len(ids)
    while start < end and int(ids[start]) in special:
        start += 1
    while start < end and int(ids[end - 1]) in special:
        end -= 1
    return start, end


def without_ends(ids: NDArray[Any], special: Collection[int]) -> NDArray[Any]:
    """Return ids without the special ones at the beginning and the end; a view."""
    start, end = ends_of(ids, special)
    return ids[start:end]
