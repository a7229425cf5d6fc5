"""Tensors that have another shape elsewhere."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """How a matrix of ours, or a part of one along its rows, lies in another library.

    Attributes:
        dims: its dimensions there.
        transposed: whether it is our transpose that has them.
        zero_rows: rows of zeros there that stand above ours: classes whose logit is always 0.
    """

    dims: tuple[int, ...]
    transposed: bool = False
    zero_rows: int = 0
