"""The position of a batch in the data, as JSON in a checkpoint, and its check against the data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np

from modernbert_train.config.schema import PhaseConfig
from modernbert_train.core.read_json import Count
from modernbert_train.data.packing import ChunkState, PackerState
from modernbert_train.data.shuffle import CursorState, ShuffledChunks, tokens_given


class PlannerState(TypedDict):
    """The position at which a batch of a `BatchPlanner` starts.

    Attributes:
        tokens: global tokens before it.
        phase: of the batch before; None before the first.
        streams: the position in each stream.
        weights, lag: of the queue that chooses among them.
        packer: chunks that wait for a row, and finished rows.
    """

    tokens: Count
    phase: str | None
    streams: dict[str, CursorState]
    weights: list[int]
    lag: list[int]
    packer: PackerState


def check_state(
    state: PlannerState,
    streams: Mapping[str, ShuffledChunks],
    special_tokens: int,
    phases: Sequence[PhaseConfig] | None,
) -> None:
    """Check every number of a position against the streams.

    A number beyond an array would crash the compiled loops, and a wrong one would silently train on other text.

    Args:
        state: from a checkpoint; `as_type` has checked its types.
        streams: of the run, in the order in which their documents are numbered.
        special_tokens: of each chunk.
        phases: of the run; None if the position may come from another run, whose phases are unknown.

    Raises:
        ValueError: an impossible number; names the field, the value and the limit.
    """
    if state["streams"].keys() != streams.keys():
        raise ValueError(f"streams: expected {', '.join(streams)}, found {', '.join(state['streams'])}")
    for field in ("weights", "lag"):
        if len(state[field]) != len(streams):
            raise ValueError(
                f"{field}: expected a number for each of {len(streams)} streams, found {len(state[field])}"
            )
    if min(state["weights"]) < 0 or not any(state["weights"]):
        raise ValueError(f"weights: expected shares from 0 up and one above 0, found {state['weights']}")
    if sum(state["lag"]):
        raise ValueError(f"lag: expected numbers that add up to 0, found {state['lag']}")
    packer = state["packer"]
    room = packer["row_tokens"]
    waiting = sum(chunk[3] for _, chunk in _chunks(packer))
    for name, cursor in state["streams"].items():
        if phases is not None:
            _require_one_of(
                f"streams.{name}.laid_out_for", cursor["laid_out_for"],
                {0, *(phase.row_tokens - special_tokens for phase in phases)},
            )  # fmt: skip
            # a stream has given out the trained and the waiting chunks; a later phase may begin an epoch early and drop
            # waiting chunks
            early = len(phases) + 1 if state["tokens"] >= phases[0].tokens else 0
            epochs = (state["tokens"] + waiting) // max(1, streams[name].num_tokens) + early
            if cursor["epoch"] > epochs:
                raise ValueError(f"streams.{name}.epoch: expected at most {epochs}, found {cursor['epoch']}")
        _check_cursor(f"streams.{name}", cursor, streams[name])
    if phases is not None:
        _require_one_of("packer.row_tokens", room, {phase.row_tokens for phase in phases})
    for number, row in enumerate(packer["ready"]):
        if not row or sum(chunk[3] + special_tokens for chunk in row) > room:
            raise ValueError(f"packer.ready[{number}]: expected 1 to {room} tokens, found {len(row)} chunks: {row[:4]}")
    _check_chunks(packer, state["streams"], streams, room - special_tokens)


def _require_one_of(field: str, found: int, expected: Collection[int]) -> None:
    if found not in expected:
        raise ValueError(f"{field}: the run's phases allow {', '.join(map(str, sorted(expected)))}, found {found}")


def _check_cursor(field: str, cursor: CursorState, chunks: ShuffledChunks) -> None:
    """Check the position in one stream; lays out its block, as the next batch would."""
    if cursor["block"] >= chunks.num_blocks:
        raise ValueError(f"{field}.block: the stream has {chunks.num_blocks} blocks, found {cursor['block']}")
    longest, taken, offset = cursor["laid_out_for"], cursor["taken"], cursor["offset"]
    if taken or offset:
        if not longest:
            raise ValueError(f"{field}.laid_out_for: expected above 0 where something was taken, found 0")
        block = chunks.block(cursor["epoch"], cursor["block"], longest)
        if taken > len(block):
            raise ValueError(f"{field}.taken: the block has {len(block)} chunks, found {taken}")
        left = int(block[taken, 2]) if taken < len(block) else 1
        if offset >= left:
            raise ValueError(f"{field}.offset: expected less than the {left} tokens of the chunk, found {offset}")
    given = tokens_given(cursor, chunks)
    if cursor.get("given", given) != given:
        raise ValueError(
            f"{field}: epoch {cursor['epoch']}, block {cursor['block']}, {taken} chunks taken and offset {offset} are "
            f"{given} tokens of the epoch, and {field}.given is {cursor.get('given')}"
        )


def _check_chunks(
    packer: PackerState, cursors: Mapping[str, CursorState], streams: Mapping[str, ShuffledChunks], longest: int
) -> None:
    """Check that each chunk of a packer is part of a document that its stream has given out."""
    firsts = np.cumsum([0, *(chunks.num_documents for chunks in streams.values())])
    for field, (epoch, document, start, length) in _chunks(packer):
        if document >= firsts[-1]:
            raise ValueError(f"{field}: there are {firsts[-1]} documents, found number {document}")
        index = int(np.searchsorted(firsts, document, side="right")) - 1
        name = list(streams)[index]
        there = streams[name].length_of(int(document - firsts[index]))
        if not 0 < length <= longest or start + length > there:
            raise ValueError(
                f"{field}: expected 1 to {longest} tokens within the {there} of document {document}, "
                f"found {length} from {start}"
            )
        if epoch > cursors[name]["epoch"]:
            raise ValueError(f"{field}: stream {name} is in epoch {cursors[name]['epoch']}, found epoch {epoch}")


def _chunks(packer: PackerState) -> Iterator[tuple[str, ChunkState]]:
    for row_number, row in enumerate(packer["ready"]):
        for number, chunk in enumerate(row):
            yield f"packer.ready[{row_number}][{number}]", chunk
    for number, (_, chunk) in enumerate(packer["waiting"]):
        yield f"packer.waiting[{number}]", chunk
