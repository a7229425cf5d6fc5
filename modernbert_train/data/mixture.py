"""Several folders of shards as one numbered collection of documents.

A stream's order and masks are keyed by the run's seed and the stream's name: adding a stream, or changing its share,
does not change them for the others. Documents are numbered through all streams, sorted by name, so the order in a YAML
file does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import DataConfig
from modernbert_train.core.files import saying
from modernbert_train.core.keyed_random import Keys, derive, derive_each
from modernbert_train.data.packing import Chunk
from modernbert_train.errors import DataError

if TYPE_CHECKING:  # streaming imports torch, and `plan` uses seeds without it
    from modernbert_train.data.mds import TokenShards

_MASKS, _STREAMS = 3, 5


@dataclass(frozen=True)
class Stream:
    """One source of documents.

    Attributes:
        name: its name in the configuration.
        seed: keys its order and masks.
        shards: its documents, numbered from 0.
    """

    name: str
    seed: int
    shards: TokenShards


def stream_seed(data: DataConfig, seed: int, name: str) -> int:
    """Return the seed of one of data.streams; data.train, as the only stream, has the run's seed."""
    if data.train is not None:
        return seed
    return derive(seed, _STREAMS, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def named_stream(stream: str) -> AbstractContextManager[None]:
    """Context that puts a stream's name before errors of its shards."""
    return saying(f"stream {stream}: ")


class TokenStreams:
    """The documents of several streams under one numbering.

    Args:
        streams: at least one, in the order of numbering.

    Attributes:
        names: of the streams.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = tuple(streams)
        self.names = tuple(stream.name for stream in streams)
        self._first = np.cumsum([0, *(len(stream.shards.lengths) for stream in streams)])
        self._mask_keys: Keys = np.array([derive(stream.seed, _MASKS) for stream in streams], dtype=np.uint64)

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens of each document; for several streams a copy in memory, 4 bytes a document."""
        lengths = [stream.shards.lengths for stream in self._streams]
        return lengths[0] if len(lengths) == 1 else np.concatenate(lengths)

    def read(self, document: int) -> NDArray[Any]:
        """Return the token ids of one document, without [CLS] and [SEP].

        Raises:
            RunError: as TokenShards.read, with the stream's name.
        """
        stream, number = self._find(document)
        with named_stream(stream.name):
            return stream.shards.read(number)

    def inside_words(self, document: int) -> NDArray[Any]:
        """Return True for each token of one document that continues a segmenter's word. Raises as `read`."""
        stream, number = self._find(document)
        with named_stream(stream.name):
            return stream.shards.inside_words(number)

    def stream_of(self, document: int) -> str:
        """Return the name of a document's stream."""
        return self._find(document)[0].name

    def describe(self, document: int) -> str:
        """Describe a document: its stream, and its number among the stream's documents."""
        stream, number = self._find(document)
        return f"{stream.name}, document {number:,} of {len(stream.shards.lengths):,}"

    def mask_keys(self, chunks: Sequence[Chunk]) -> Keys:
        """Return a key for each chunk, by its stream's seed, epoch, document within the stream, and start only."""
        columns = np.array(chunks, dtype=np.int64).reshape(-1, len(Chunk._fields))
        epochs, documents, starts, _ = columns.T
        streams = np.searchsorted(self._first, documents, side="right") - 1
        return derive_each(self._mask_keys[streams], epochs, documents - self._first[streams], starts)

    def labels(self, chunks: Sequence[Chunk]) -> NDArray[Any] | None:
        """Return labels of the chunks' documents, see `PackedText`; None if the documents are unlabelled.

        Raises:
            DataError: a chunk is only part of a labelled document, or only some of the streams here have labels.
        """
        places = [self._find(chunk.document) for chunk in chunks]
        here = [stream for stream, _ in places] or self._streams
        labels = next((stream.shards.labels for stream in here if stream.shards.labels is not None), None)
        if labels is None:
            return None
        arrays = []
        for chunk, (stream, number) in zip(chunks, places, strict=True):
            with named_stream(stream.name):
                if stream.shards.labels is None:
                    raise DataError(f"{stream.shards.folder}: lacks labels, and other streams have them. Leave it out.")
                arrays.append(stream.shards.labels.of(number, chunk))
        if not arrays:
            return labels.none()
        widest = max(each.shape[-1] for each in arrays)  # for pairs, streams differ in their number of negatives
        return np.concatenate([each if each.ndim == 1 else _widened(each, widest) for each in arrays])

    @property
    def shards(self) -> dict[str, TokenShards]:
        """Return the shards of each stream, by name."""
        return {stream.name: stream.shards for stream in self._streams}

    def _find(self, document: int) -> tuple[Stream, int]:
        index = int(np.searchsorted(self._first, document, side="right")) - 1 if len(self._streams) > 1 else 0
        return self._streams[index], document - int(self._first[index])


def _widened(labels: NDArray[Any], width: int) -> NDArray[Any]:
    return labels if labels.shape[1] == width else np.pad(labels, ((0, 0), (0, width - labels.shape[1])))
