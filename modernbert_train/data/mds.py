"""Read a document's tokens from MDS shards; the only reader that uses mosaicml-streaming.

It uses Streaming's formats, compression and hashes, but not StreamingDataset. We need any document by number, in our
own order, and no silent failures: StreamingDataset keeps shared memory that outlives a kill, ends an epoch early when a
background thread fails, and does not verify local shards. Here every shard is hashed once when it is opened, and each
fault has its error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.own_files import require_own_file
from modernbert_train.data.arrays import load_lengths
from modernbert_train.data.dataset_card import INDEX, INSIDE_WORDS, LENGTHS, DatasetCard
from modernbert_train.data.labels import read_labels
from modernbert_train.data.remote import REMEDY as REMOTE_REMEDY
from modernbert_train.data.remote import RemoteFolder
from modernbert_train.data.shard_file import (
    IdColumn,
    ShardData,
    as_line,
    fault_of,
    unpack,
    without_ends,
)
from modernbert_train.data.shard_index import REMEDY, read_index, stored
from modernbert_train.errors import DataError


class _OpenShard(NamedTuple):
    documents: ShardData
    ids_of: IdColumn
    inside_of: IdColumn | None  # words of a segmenter, if they are stored
    sound: NDArray[np.bool_]  # documents already verified


class TokenShards:
    """The documents of one folder of MDS shards, by number.

    Args:
        folder: of index.json, the shards and lengths.npy.
        column: the column that holds the tokens.
        vocab_size: one more than the largest token id allowed.
        max_open_shards: decompressed shards kept in memory.
        remote: source of the shards; `folder` then holds copies of the small files.
        card: of the folder; None: written by data_prep/prepare.py, and labels are not read.

    Attributes:
        shard_documents: int64 [shards], documents in each shard; documents are numbered through all shards in order.
        shard_bytes: int64 [shards], size of each shard as stored.
        remote: as passed.
        lengths: tokens of each document.
        tokens: of all documents; the card's number, if there is a card.
        labels: of each document; None: unlabelled.

    Raises:
        DataError: the index or the lengths are missing, damaged, or contradict each other.
    """

    def __init__(
        self,
        folder: str | Path,
        column: str,
        vocab_size: int,
        max_open_shards: int,
        *,
        remote: RemoteFolder | None = None,
        card: DatasetCard | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.remote = remote
        self._column = column
        self._vocab_size = vocab_size
        self._max_open = max_open_shards
        self._adopted = card is not None and card.is_adopted
        self._home = self.folder if card is None else self.folder / (card.shards or "")
        self._dtype = None if card is None else card.dtype
        self._has_words = card is not None and card.words is True
        self._special = frozenset(() if card is None else card.stripped or ())
        index = INDEX if card is None else card.index_file
        self._shards = read_index(self.folder / index, column, nested=self._adopted)
        self.shard_documents, self.shard_bytes = self._shards.documents, self._shards.bytes
        self._first = np.concatenate([[0], np.cumsum(self.shard_documents)])
        self.lengths = self._read_lengths()
        self.tokens = int(np.sum(self.lengths, dtype=np.int64)) if card is None else card.tokens
        self.labels = None if card is None else read_labels(self.folder, card, self.lengths)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def read(self, document: int) -> NDArray[Any]:
        """Return the token ids of one document, without [CLS] and [SEP]; a read-only view.

        Raises:
            DataError: its shard is missing or damaged, or the document does not match its length.
            ConfigError, StorageError: a remote shard cannot be fetched; see `RemoteFolder.read`.
        """
        number = self._shard_of(document)
        shard = self._open_shard(number)
        at = document - int(self._first[number])
        with self._breaking(number, f"document {at} "):
            tokens = shard.ids_of(shard.documents.sample(at))
        if self._adopted:
            tokens = as_line(tokens)
            tokens = without_ends(tokens, self._special) if tokens.ndim == 1 else tokens
        if not shard.sound[at]:
            self._require_sound(number, at, tokens)
            shard.sound[at] = True
        return tokens

    def inside_words(self, document: int) -> NDArray[np.uint8]:
        """Return 1 for each token of a document that continues a segmenter's word, else 0; a view. Raises as `read`.

        Only for a folder whose card has `words`.
        """
        number = self._shard_of(document)
        shard = self._open_shard(number)
        assert shard.inside_of is not None
        at = document - int(self._first[number])
        with self._breaking(number, f"document {at} "):
            return shard.inside_of(shard.documents.sample(at))

    def fetch_ahead(self, shard: int) -> None:
        """Fetch a remote shard into the cache; a no-op for local ones. Raises as `read`."""
        if self.remote is not None:
            name, size = stored(self._shards[shard])["basename"], int(self.shard_bytes[shard])
            self.remote.fetch_ahead(name, size, lambda data: self._fault(shard, data))

    def _shard_of(self, document: int) -> int:
        return int(np.searchsorted(self._first, document, side="right")) - 1

    def _require_sound(self, shard: int, at: int, tokens: object) -> None:
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise self._broken(shard, f"document {at} is not a row of token ids")
        length = self.lengths[int(self._first[shard]) + at]
        if len(tokens) != length:
            raise self._broken(shard, f"document {at} has {len(tokens)} tokens, lengths.npy says {length}")
        for id in (int(tokens.min()), int(tokens.max())) if len(tokens) else ():
            if not 0 <= id < self._vocab_size:
                raise DataError(
                    f"{self._name(shard)}: document {at} holds token id {id}, the tokenizer has {self._vocab_size} "
                    "entries. The shards belong to another tokenizer; name theirs in data.tokenizer."
                )

    def _read_lengths(self) -> NDArray[Any]:
        path = self.folder / LENGTHS
        lengths = load_lengths(path, REMEDY)
        if len(lengths) != self._first[-1]:
            raise DataError(f"{path}: has {len(lengths)} lengths, index.json has {self._first[-1]} documents. {REMEDY}")
        return lengths

    def _name(self, shard: int) -> str:
        """Return the path or URL of a shard, for messages."""
        basename = stored(self._shards[shard])["basename"]
        return f"{self._home if self.remote is None else self.remote.url}/{basename}"

    def _broken(self, shard: int, problem: str) -> DataError:
        return DataError(f"{self._name(shard)}: {problem}. {REMEDY if self.remote is None else REMOTE_REMEDY}")

    @contextmanager
    def _breaking(self, shard: int, document: str = "") -> Iterator[None]:
        """Context that turns any error into a DataError: the bytes are untrusted, and numpy raises many types."""
        try:
            yield
        except Exception as error:
            raise self._broken(shard, f"{document}cannot be opened as index.json says ({error})") from error

    def _open_shard(self, shard: int) -> _OpenShard:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        data = self._read_file(shard)
        with self._breaking(shard):
            documents = unpack(self._shards[shard], data)
            ids_of = IdColumn(self._shards[shard], self._column, self._dtype)
            inside_of = IdColumn(self._shards[shard], INSIDE_WORDS, None) if self._has_words else None
        opened = _OpenShard(documents, ids_of, inside_of, np.zeros(len(documents.offsets) - 1, np.bool_))
        self._open[shard] = opened
        if len(self._open) > self._max_open:
            self._open.popitem(last=False)
        return opened

    def _read_file(self, shard: int) -> bytes:
        """Return the bytes of a shard as stored, verified against the index."""
        basename = stored(self._shards[shard])["basename"]
        if self.remote is not None:
            return self.remote.read(basename, int(self.shard_bytes[shard]), lambda data: self._fault(shard, data))
        if self._adopted:
            require_own_file(self._home / basename, self._home)
        with os_errors_as(DataError, f"{self._name(shard)}: cannot be read", REMEDY):
            data = (self._home / basename).read_bytes()
        fault = self._fault(shard, data)
        if fault is not None:
            raise self._broken(shard, fault)
        return data

    def _fault(self, shard: int, data: bytes) -> str | None:
        """Return the problem with the bytes of a shard, or None."""
        return fault_of(self._shards[shard], data)
