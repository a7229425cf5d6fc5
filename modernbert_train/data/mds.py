"""MDS shards -> tokens of a document. The one door to mosaicml-streaming when reading.

Streaming's formats, compression and hashes are used; its StreamingDataset is not. We need any document by number,
in an order of our own, and no silent failures: StreamingDataset keeps shared memory that outlives a kill, ends an
epoch early when a background thread fails, and does not check local shards. Here every shard is hashed once when it
is opened, and each fault has a name.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train import compat
from modernbert_train.errors import DataError

compat.install()

from streaming.base.compression import decompress  # noqa: E402
from streaming.base.format import reader_from_json  # noqa: E402
from streaming.base.hashing import get_hash  # noqa: E402

REMEDY = "Restore it from a copy, or prepare the data again with data_prep/prepare.py --overwrite."


class TokenShards:
    """The documents of one folder of MDS shards, by number.

    Args:
        folder: where index.json, the shards and lengths.npy are.
        column: the column that holds the tokens.
        vocab_size: one more than the largest token id allowed.
        max_open_shards: decompressed shards kept in memory.

    Raises:
        DataError: the index or the lengths are missing, damaged, or contradict each other.
    """

    def __init__(self, folder: str | Path, column: str, vocab_size: int, max_open_shards: int) -> None:
        self.folder = Path(folder)
        self._column = column
        self._vocab_size = vocab_size
        self._max_open = max_open_shards
        self._shards = self._read_index()
        self.shard_documents = [int(shard["samples"]) for shard in self._shards]
        self._first = np.concatenate([[0], np.cumsum(self.shard_documents)])
        self.lengths = self._read_lengths()
        self._open: OrderedDict[int, tuple[bytes, NDArray[np.uint32], Any]] = OrderedDict()

    def read(self, document: int) -> NDArray[Any]:
        """Token ids of one document, [CLS] and [SEP] not included.

        Raises:
            DataError: its shard is missing or damaged, or the document is not what the lengths say.
        """
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        raw, offsets, reader = self._open_shard(shard)
        at = document - int(self._first[shard])
        try:
            tokens = reader.decode_sample(raw[offsets[at] : offsets[at + 1]])[self._column]
        except Exception as error:
            raise self._broken(shard, f"document {at} cannot be decoded ({error})") from error
        if len(tokens) != self.lengths[document]:
            raise self._broken(
                shard, f"document {at} has {len(tokens)} tokens, lengths.npy says {self.lengths[document]}"
            )
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            raise DataError(
                f"{self._path(shard)}: document {at} holds token id {int(tokens.max())}, the tokenizer has "
                f"{self._vocab_size} entries. The shards belong to another tokenizer; name theirs in data.tokenizer."
            )
        return tokens

    def _read_index(self) -> list[dict[str, Any]]:
        path = self.folder / "index.json"
        try:
            shards = list(json.loads(path.read_text(encoding="utf-8"))["shards"])
            for shard in shards:
                for info in (shard["raw_data"], shard["zip_data"]):
                    if info is not None and Path(info["basename"]).name != info["basename"]:
                        raise DataError(f"{path}: names a file outside its folder: {info['basename']!r}. {REMEDY}")
                if shard["format"] != "mds" or self._column not in shard["column_names"]:
                    raise DataError(f"{path}: no MDS column {self._column!r} in {shard['column_names']}. {REMEDY}")
                stored = shard["zip_data"] or shard["raw_data"]
                if int(shard["samples"]) < 0 or int(stored["bytes"]) < 0 or not dict(stored["hashes"]):
                    raise DataError(f"{path}: {stored['basename']} has no size or no hash to be checked by. {REMEDY}")
                if any(encoding == "pkl" for encoding in shard["column_encodings"]):
                    raise DataError(f"{path}: a column is pickled, and unpickling runs code. {REMEDY}")
        except FileNotFoundError:
            raise DataError(f"{path}: no such file, so there are no shards in this folder. {REMEDY}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a readable MDS index ({type(error).__name__}: {error}). {REMEDY}") from None
        if not shards:
            raise DataError(f"{path}: lists no shards. {REMEDY}")
        return shards

    def _read_lengths(self) -> NDArray[Any]:
        path = self.folder / "lengths.npy"
        try:
            lengths = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); packing needs each document's length. {REMEDY}"
            ) from None
        if len(lengths) != self._first[-1]:
            raise DataError(f"{path}: has {len(lengths)} lengths, index.json has {self._first[-1]} documents. {REMEDY}")
        return lengths

    def _path(self, shard: int) -> Path:
        info = self._shards[shard]["zip_data"] or self._shards[shard]["raw_data"]
        return self.folder / info["basename"]

    def _broken(self, shard: int, found: str) -> DataError:
        return DataError(f"{self._path(shard)}: {found}. {REMEDY}")

    def _open_shard(self, shard: int) -> tuple[bytes, NDArray[np.uint32], Any]:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        info = self._shards[shard]
        stored = info["zip_data"] or info["raw_data"]
        try:
            data = self._path(shard).read_bytes()
        except OSError as error:
            raise self._broken(shard, f"cannot be read ({error.strerror})") from None
        if len(data) != stored["bytes"]:
            raise self._broken(shard, f"has {len(data)} bytes, index.json says {stored['bytes']}")
        algorithm, expected = next(iter(stored["hashes"].items()))
        try:
            found = get_hash(algorithm, data)
            if found != expected:
                raise self._broken(shard, f"is damaged: its {algorithm} is {found}, index.json says {expected}")
            if info["zip_data"]:
                data = decompress(info["compression"], data)
            count = int(np.frombuffer(data, np.uint32, 1)[0])
            if count != info["samples"]:
                raise self._broken(shard, f"holds {count} documents, index.json says {info['samples']}")
            offsets = np.frombuffer(data, np.uint32, count + 1, offset=4)
            opened = (data, offsets, reader_from_json(str(self.folder), None, dict(info)))
        except DataError:
            raise
        except Exception as error:  # an index that does not tell the truth about the shard
            raise self._broken(shard, f"cannot be opened as index.json says ({error})") from None
        self._open[shard] = opened
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return opened
