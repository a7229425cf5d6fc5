"""Arrays stored next to shards: lengths, counts, labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import os_errors_as
from modernbert_train.errors import DataError


def load_array(path: Path, remedy: str) -> NDArray[Any]:
    """Return the array in a .npy file, memory-mapped.

    Raises:
        DataError: it is missing or damaged; names the remedy.
    """
    with os_errors_as(DataError, f"{path}: cannot be read", remedy, ValueError, EOFError, TypeError):
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def load_lengths(path: Path, remedy: str) -> NDArray[Any]:
    """Return lengths.npy, the tokens of each document. Raises DataError as `load_array`, and for a wrong shape."""
    lengths = load_array(path, remedy)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise DataError(f"{path}: holds {lengths.dtype} of shape {lengths.shape}, and no line of lengths. {remedy}")
    return lengths
