"""Tensors that other libraries store in another shape."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Stored form of a matrix, or of a part of one along its rows, in another library.

    Attributes:
        dims: its dimensions there.
        transposed: True if the transpose has these dimensions.
        zero_rows: rows of zeros stored above it: classes whose logit is always 0.
    """

    dims: tuple[int, ...]
    transposed: bool = False
    zero_rows: int = 0
