"""Tensors that have another shape elsewhere, with the same numbers."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """How a matrix of ours, or a part of one along its rows, lies in another library.

    Attributes:
        dims: its dimensions there.
        transposed: whether it is our transpose that has them.
    """

    dims: tuple[int, ...]
    transposed: bool = False
