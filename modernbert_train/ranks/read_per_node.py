"""Large files that every rank asks for are read by one rank of each machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from modernbert_train.errors import RunError
from modernbert_train.ranks.group import gather_from_all, local_rank, this_rank
from modernbert_train.read_once import asked_for, known, learn

T = TypeVar("T")


def read_once_per_node(ask: Callable[[], T], read: Callable[[Path], Any]) -> T:
    """`ask()` of every rank; a file that the first rank of its machine has read for it is not read by the others.

    A rank that sees another file under the same name, as in a container of its own, reads that. A collective.

    Args:
        ask: reads files through `read_once`.
        read: how; what it gives is small, since it travels.

    Raises:
        RunError: what `ask` raises, on the ranks where it does.
    """
    found: list[tuple[str, tuple[int, ...], Any]] = []
    if local_rank() == 0:
        with asked_for() as paths, suppress(RunError):  # every rank comes to it below
            ask()
        found = known(read, paths)
    told = gather_from_all(found)
    learn(read, told[this_rank() - local_rank()])
    return ask()
