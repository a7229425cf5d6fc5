"""labels.npy beside shards: what each document, or each token of it, is to be told.

By document the file is a table, one row each: the number of a class, a 0 or 1 for each class, or a score. By token it
is a line as long as all documents end to end, with IGNORED_LABEL where nothing is told. The card has its hash.
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
        values: see above.
        lengths: tokens of each document.

    Raises:
        ValueError: there are more or fewer of them.
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
        """Of one document [1, L], or of its tokens."""
        if self._ends is None:
            return self._values[document : document + 1]
        end = int(self._ends[document])
        return self._values[end - int(self._lengths[document]) : end]

    def of(self, document: int, chunk: Chunk) -> NDArray[Any]:
        """Those of a chunk, which must be the whole document.

        Raises:
            DataError: it is a part: nobody could say what the label of a part is.
        """
        length = int(self._lengths[document])
        if (chunk.start, chunk.length) != (0, length):
            raise DataError(
                f"document {document:,} has a label and {length} tokens, and was cut to {chunk.length}. Raise the "
                "row_tokens of all phases, or write the shards anew for shorter rows."
            )
        return self[document]

    def none(self) -> NDArray[Any]:
        """Of no document."""
        return self._values[:0]


def read_labels(folder: Path, card: DatasetCard, lengths: NDArray[Any]) -> DocumentLabels | None:
    """The labels of a folder of shards; None where its card names none.

    Raises:
        DataError: they cannot be read, or are not those of the documents.
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
