"""Arrays stored next to shards: lengths, counts, labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import os_errors_as
from modernbert_train.data.dataset_card import LENGTHS
from modernbert_train.errors import ConfigError, DataError


def load_array(path: Path, remedy: str) -> NDArray[Any]:
    """Return the array in a .npy file, memory-mapped.

    Raises:
        DataError: it is missing or damaged; names the remedy.
    """
    with os_errors_as(DataError, f"{path}: cannot be read", remedy, ValueError, EOFError, TypeError):
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def load_lengths(path: Path, remedy: str) -> NDArray[Any]:
    """Return lengths.npy, the tokens of each document. Raises DataError as `load_array`, and for a wrong shape."""
    lengths = load_array(path, remedy)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise DataError(f"{path}: holds {lengths.dtype} of shape {lengths.shape}, not a row of lengths. {remedy}")
    return lengths


def held_out_lengths(
    lengths: NDArray[Any] | Sequence[int], max_tokens: int | None, *, whole: bool, key: str
) -> NDArray[Any]:
    """Return the tokens of each held-out document that a measurement reads: documents in order, up to eval.max_tokens.

    Args:
        lengths: tokens of each document.
        max_tokens: eval.max_tokens; None reads all.
        whole: leave out the document that crosses the limit, since labels belong to whole documents; False cuts it.
        key: the configuration key that names the text, for the message.

    Raises:
        ConfigError: not one document is read.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    if max_tokens is None:
        return lengths_N
    ends = np.cumsum(lengths_N)
    read = int(np.searchsorted(ends, max_tokens, side="right"))
    if not whole:
        return np.minimum(lengths_N, max_tokens - (ends - lengths_N))[: read + 1]
    if not read and len(lengths_N):
        raise ConfigError(
            f"eval.max_tokens={max_tokens:,}: the first document of {key} has {lengths_N[0]:,} tokens, and a document "
            f"with labels cannot be cut. Set at least {lengths_N[0]}."
        )
    return lengths_N[:read]


def read_held_out(folder: Path, max_tokens: int | None, *, whole: bool, key: str) -> NDArray[Any]:
    """Read the lengths of a folder of shards; see `held_out_lengths`."""
    return held_out_lengths(load_lengths(folder / LENGTHS, "Prepare the data again."), max_tokens, whole=whole, key=key)
