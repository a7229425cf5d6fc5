"""A place in the data as JSON, as a checkpoint holds it, and whether the data have such a place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from modernbert_train.core.read_json import Count
from modernbert_train.data.packing import PackerState
from modernbert_train.data.shuffle import CursorState, ShuffledChunks


class PlannerState(TypedDict):
    """Where a batch of a `BatchPlanner` starts.

    Attributes:
        tokens: global tokens before it.
        phase: of the batch before; None before the first.
        streams: the place in each stream.
        weights, lag: of the queue that chooses among them.
        packer: what waits for a row.
    """

    tokens: Count
    phase: str | None
    streams: dict[str, CursorState]
    weights: list[int]
    lag: list[int]
    packer: PackerState


def check_place(state: PlannerState, streams: Mapping[str, ShuffledChunks]) -> None:
    """Make sure that a place is one of these streams: in the middle of a batch it would be an index beyond an array.

    Raises:
        ValueError: it is not; names the field and its value.
    """
    if state["streams"].keys() != streams.keys():
        raise ValueError(f"streams: expected {', '.join(streams)}, found {', '.join(state['streams'])}")
    for name, cursor in state["streams"].items():
        if cursor["block"] >= streams[name].num_blocks:
            raise ValueError(f"streams.{name}.block: no such place in the data, found {cursor['block']}")
