"""Write one folder of MDS shards: tokens, lengths, token counts, and the card with their hashes.

Special tokens are not stored: a long document is kept whole, and the loader adds [CLS] and [SEP] to every chunk. Labels
may be added, see labels.py.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train import import_hook
from modernbert_train.core.version import __version__
from modernbert_train.data.dataset_card import (
    INDEX,
    INSIDE_WORDS,
    LABELS,
    LENGTHS,
    TOKEN_COUNTS,
    DatasetCard,
    file_sha256,
    file_xxh3,
    write_card,
)

import_hook.activate()

from streaming import MDSWriter  # noqa: E402

COLUMN = "tokens"
_COUNTED_AT_ONCE = 64  # documents


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class ShardWriter:
    """Writes documents in the order of arrival; the same documents give the same bytes.

    Args:
        folder: created by the writer; must not exist.
        vocab_size: entries of the tokenizer.
        tokenizer_sha256: of its tokenizer.json.
        shard_bytes: size of a shard before compression; a larger document gets a shard to itself.
        words: write a second column that marks tokens which continue a word, see `write`.

    Attributes:
        tokens: written so far.
        token_counts: int64, number of occurrences by id; complete after `finish`.
    """

    def __init__(
        self, folder: Path, vocab_size: int, tokenizer_sha256: str, shard_bytes: int, *, words: bool = False
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer_sha256 = tokenizer_sha256
        self._dtype = token_dtype(vocab_size)
        self._words = words
        self._lengths = array("I")
        self._labels: list[NDArray[Any]] = []
        self._uncounted: list[NDArray[np.unsignedinteger]] = []
        self.token_counts = np.zeros(vocab_size, np.int64)
        self.tokens = 0
        self._mds = MDSWriter(
            columns={COLUMN: f"ndarray:{self._dtype.name}"} | ({INSIDE_WORDS: "ndarray:uint8"} if words else {}),
            out=str(folder),
            compression="zstd:3",
            hashes=["xxh64"],
            size_limit=shard_bytes,
        )

    @property
    def documents(self) -> int:
        return len(self._lengths)

    def write(
        self,
        ids: list[int] | NDArray[np.integer],
        labels: NDArray[Any] | None = None,
        inside_words: NDArray[np.uint8] | None = None,
    ) -> None:
        """Add one document of at least one token; either all have labels, [1, L] or one for each token, or none has.

        With `words`, `inside_words` is 1 for each token that continues a segmenter's word, 0 for others.

        Raises:
            OSError: the disk is full or fails.
        """
        tokens = np.array(ids, self._dtype)
        self._mds.write({COLUMN: tokens} | ({INSIDE_WORDS: inside_words} if self._words else {}))
        self._lengths.append(len(ids))
        self._uncounted.append(tokens)
        self.tokens += len(ids)
        if labels is not None:
            self._labels.append(labels)
        if len(self._uncounted) >= _COUNTED_AT_ONCE:
            self._count()

    def finish(self) -> DatasetCard:
        """Write the last shard, the index, lengths.npy (uint32), token_counts.npy (int64) and the card."""
        self._mds.finish()
        self._count()
        np.save(self._folder / LENGTHS, np.frombuffer(self._lengths, np.uint32))
        np.save(self._folder / TOKEN_COUNTS, self.token_counts)
        if self._labels:
            np.save(self._folder / LABELS, np.concatenate(self._labels))
        card = DatasetCard(
            column=COLUMN,
            dtype=self._dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            vocab_size=self._vocab_size,
            tokenizer_sha256=self._tokenizer_sha256,
            index_sha256=file_sha256(self._folder / INDEX),
            lengths_sha256=file_sha256(self._folder / LENGTHS),
            special_tokens="loader",
            created_by=f"modernbert-train {__version__}",
            labels_sha256=file_sha256(self._folder / LABELS) if self._labels else None,
            lengths_xxh3=file_xxh3(self._folder / LENGTHS),
            words=self._words or None,
        )
        write_card(self._folder, card)
        return card

    def _count(self) -> None:
        """Count the ids of several documents at once; singly, a vocabulary of 50,000 costs as much as tokenising."""
        if self._uncounted:
            self.token_counts += np.bincount(np.concatenate(self._uncounted), minlength=self._vocab_size)
            self._uncounted = []
