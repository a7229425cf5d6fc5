"""A place in the data as JSON, as a checkpoint holds it, and whether the data have such a place.

What is not looked at here would be found in the middle of the first batch, as an index beyond an array, or worse, as
text that is skipped without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from modernbert_train.data.packing import ChunkState, PackerState
from modernbert_train.data.shuffle import CursorState, ShuffledChunks
from modernbert_train.read_json import Count


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


def check_place(state: PlannerState, streams: Mapping[str, ShuffledChunks], special_tokens: int) -> None:
    """Make sure that the data have a place.

    Args:
        state: of the types that it declares.
        streams: the shuffled chunks of each stream, in the order in which their documents are numbered.
        special_tokens: that each chunk gets.

    Raises:
        ValueError: they have not; names the field and its value.
    """
    if state["streams"].keys() != streams.keys():
        raise ValueError(f"streams: expected {', '.join(streams)}, found {', '.join(state['streams'])}")
    for name, cursor in state["streams"].items():
        _require(cursor["block"] < streams[name].num_blocks, f"streams.{name}.block", cursor["block"])
    weights, lag = state["weights"], state["lag"]
    _require(len(weights) == len(streams) and min(weights) >= 0 < max(weights), "weights", weights)
    _require(len(lag) == len(streams) and sum(lag) == 0, "lag", lag)
    _check_packer(state["packer"], list(streams.values()), special_tokens)


def _check_packer(packer: PackerState, streams: Sequence[ShuffledChunks], special_tokens: int) -> None:
    row_tokens = packer["row_tokens"]
    _require(row_tokens > special_tokens, "packer.row_tokens", row_tokens)
    for number, row in enumerate(packer["ready"]):
        at = f"packer.ready[{number}]"
        taken = sum(special_tokens + _check_chunk(chunk, streams, at) for chunk in row)
        _require(0 < taken <= row_tokens, at, row)
    for number, (_, chunk) in enumerate(packer["waiting"]):
        at = f"packer.waiting[{number}]"
        _require(special_tokens + _check_chunk(chunk, streams, at) <= row_tokens, at, chunk)


def _check_chunk(chunk: ChunkState, streams: Sequence[ShuffledChunks], at: str) -> int:
    """Tokens of a chunk's text."""
    _, document, start, length = chunk
    for stream in streams:
        if document < stream.num_documents:
            _require(0 < length <= stream.length_of(document) - start, at, chunk)
            return length
        document -= stream.num_documents
    raise _no_place(at, chunk)


def _require(holds: bool, at: str, value: object) -> None:
    if not holds:
        raise _no_place(at, value)


def _no_place(at: str, value: object) -> ValueError:
    return ValueError(f"{at}: no such place in the data, found {str(value)[:60]}")
