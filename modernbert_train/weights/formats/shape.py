"""Tensors that other libraries store in another shape."""

from __future__ import annotations

from typing import Any, NamedTuple


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


def stored_shape(hub: object, name: str, config: Any) -> Shape | None:
    """Return the stored shape of a parameter's parts, or None if it is the same here."""
    ask = getattr(hub, "shape", None)
    return None if ask is None else ask(name, config)
