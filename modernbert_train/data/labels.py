"""labels.npy of a folder of shards: the labels of each document, or of each token.

By document the file is a table, one row each: the number of a class, a 0 or 1 for each class, or a score. By token it
is one row as long as all documents end to end, with IGNORED_LABEL for tokens without a label. The card has its hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import os_errors_as
from modernbert_train.data.arrays import load_array
from modernbert_train.data.dataset_card import LABELS, DatasetCard
from modernbert_train.data.packing import Chunk
from modernbert_train.errors import DataError


class DocumentLabels:
    """The labels of one folder of shards.

    Args:
        values: see the module's docstring.
        lengths: tokens of each document.

    Raises:
        ValueError: the number of labels does not match the documents.
    """

    def __init__(self, values: NDArray[Any], lengths: NDArray[Any]) -> None:
        self._values = values
        self._lengths = lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        self._ends = ends if values.ndim == 1 else None
        expected = len(lengths) if self._ends is None else int(ends[-1])
        if values.ndim > 2 or len(values) != expected:
            raise ValueError(f"labels of the shape {values.shape} for {len(lengths)} documents")

    def __getitem__(self, document: int) -> NDArray[Any]:
        """Return the labels of one document [1, L], or of its tokens."""
        if self._ends is None:
            return self._values[document : document + 1]
        end = int(self._ends[document])
        return self._values[end - int(self._lengths[document]) : end]

    def of(self, document: int, chunk: Chunk) -> NDArray[Any]:
        """Return the labels of a chunk, which must be a whole document.

        Raises:
            DataError: it is a part of a document, whose label would be undefined.
        """
        length = int(self._lengths[document])
        if (chunk.start, chunk.length) != (0, length):
            raise DataError(
                f"document {document:,} has a label and {length} tokens, and was cut to {chunk.length}. Raise the "
                "row_tokens of all phases, or write the shards again for shorter rows."
            )
        return self[document]

    def none(self) -> NDArray[Any]:
        """Return labels of no document, with the usual shape and type."""
        return self._values[:0]


def read_labels(folder: Path, card: DatasetCard, lengths: NDArray[Any]) -> DocumentLabels | None:
    """Return the labels of a folder of shards; None if its card names none.

    Raises:
        DataError: they cannot be read, or do not match the documents.
    """
    if card.labels_sha256 is None:
        return None
    path = folder / LABELS
    remedy = "Restore it from a copy, or write it again."
    with os_errors_as(DataError, f"{path}: cannot be read", remedy, ValueError):
        values = load_array(path, remedy)
        if card.sides is not None and card.scored is None:  # an earlier version wrote pairs' hashes without scores
            values = np.stack((values, np.zeros_like(values)), axis=2).reshape(len(values), -1)
        return DocumentLabels(values, lengths)
