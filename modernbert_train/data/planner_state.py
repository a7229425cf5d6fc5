"""The position of a batch in the data, as JSON in a checkpoint, and its check against the data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypedDict

import numpy as np

from modernbert_train.config.schema import PhaseConfig
from modernbert_train.core.read_json import Count
from modernbert_train.data.packing import ChunkState, Ints, PackerState
from modernbert_train.data.shuffle import CursorState, ShuffledChunks


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
    named_phases: Mapping[str, PhaseConfig] | None,
) -> None:
    """Check every number of a position against the streams.

    A number beyond an array would crash the compiled loops, and a wrong one would silently train on other text.

    Args:
        state: from a checkpoint; `as_type` has checked its types.
        streams: of the run, in the order in which their documents are numbered.
        special_tokens: of each chunk.
        named_phases: of the run; None if the position may come from another run, whose phases are unknown.

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
    phases = None if named_phases is None else list(named_phases.values())
    waiting, given_out = sum(chunk[3] for _, chunk in _chunks(packer)), 0
    blocks: dict[str, Ints] = {}
    drops = any("name" in phase.objective for phase in phases or ())  # chunks that wait, for another objective
    for name, cursor in state["streams"].items():
        if phases is not None:
            _require_one_of(
                f"streams.{name}.laid_out_for", cursor["laid_out_for"],
                {0, *(phase.row_tokens - special_tokens for phase in phases)},
            )  # fmt: skip
            # a stream has given out the trained and the waiting chunks; a later phase may begin an epoch early
            early = len(phases) + 1 if state["tokens"] >= phases[0].tokens else 0
            epochs = (state["tokens"] + waiting) // max(1, streams[name].num_tokens) + early
            if cursor["epoch"] > epochs and not drops:
                raise ValueError(f"streams.{name}.epoch: expected at most {epochs}, found {cursor['epoch']}")
        of_epoch, blocks[name] = _check_cursor(f"streams.{name}", cursor, streams[name])
        given_out += cursor["epoch"] * streams[name].num_tokens + of_epoch
    if named_phases is not None:
        last = next(iter(named_phases)) if state["phase"] is None else state["phase"]
        if last not in named_phases:
            raise ValueError(f"phase: expected one of {', '.join(named_phases)}, found {last}")
        _require_one_of("packer.row_tokens", room, {named_phases[last].row_tokens})
    for number, row in enumerate(packer["ready"]):
        if not row or sum(chunk[3] + special_tokens for chunk in row) > room:
            raise ValueError(f"packer.ready[{number}]: expected 1 to {room} tokens, found {len(row)} chunks: {row[:4]}")
    _check_chunks(packer, state["streams"], streams, room - special_tokens)
    if phases is not None:
        _check_places(packer, state["streams"], streams, blocks)
        _check_cuts(packer, streams, {phase.row_tokens - special_tokens for phase in phases})
        # chunks of one token, or chunks that fill a row; special tokens are among the trained
        tokens, longest = state["tokens"], max(phase.row_tokens for phase in phases)
        low, high = -(-tokens // (1 + special_tokens)), tokens - special_tokens * -(-tokens // longest)
        skips = drops or any(phase.restart_data for phase in phases)  # the rest of a pass
        if given_out - waiting < low or (given_out - waiting > high and not skips):
            raise ValueError(
                f"streams: {given_out} tokens are given out and {waiting} of them wait; the other "
                f"{given_out - waiting} should be {low} to {high}, for {tokens} trained tokens"
            )
        for number, (age, _) in enumerate(packer["waiting"]):
            if age > tokens + len(packer["ready"]):
                raise ValueError(
                    f"packer.waiting[{number}]: expected at most a row for each of {tokens} trained tokens, found {age}"
                )


def _check_places(
    packer: PackerState,
    cursors: Mapping[str, CursorState],
    streams: Mapping[str, ShuffledChunks],
    blocks: Mapping[str, Ints],
) -> None:
    """Check that chunks do not overlap, and that each was given out.

    Args:
        packer, cursors, streams: of the position.
        blocks: for each stream, see `_check_cursor`.
    """
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for field, (epoch, document, start, length) in _chunks(packer):
        others = seen.setdefault((epoch, document), [])
        if any(start < end and first < start + length for first, end in others):
            raise ValueError(f"{field}: {length} tokens from {start} of document {document} are in another chunk too")
        others.append((start, start + length))
        name, index = _stream_of(document, streams)
        cursor, chunks = cursors[name], streams[name]
        if epoch == cursor["epoch"] and (block := chunks.block_of(epoch, index)) >= cursor["block"]:
            _, starts, lengths = blocks[name][blocks[name][:, 0] == index].T
            inside = (starts <= start) & (start + length <= starts + lengths)
            if block > cursor["block"] or not inside.any():
                raise ValueError(
                    f"{field}: {length} tokens from {start} of document {document} lie beyond what stream {name} has "
                    "given out"
                )


def _check_cuts(packer: PackerState, streams: Mapping[str, ShuffledChunks], sizes: Collection[int]) -> None:
    """Check that chunks begin and end where rows of these sizes, one after the other, can have cut a document."""
    ends = max((start + length for _, (_, _, start, length) in _chunks(packer)), default=0)
    cuts = 1  # bit n: a sum of sizes is n
    for size in sizes:
        while size <= ends:
            cuts |= cuts << size & (2 << ends) - 1
            size *= 2
    for field, (_, document, start, length) in _chunks(packer):
        name, index = _stream_of(document, streams)
        end = start + length
        if not (cuts >> start & 1 and (cuts >> end & 1 or end == streams[name].length_of(index))):
            raise ValueError(
                f"{field}: rows cut documents into chunks of {', '.join(map(str, sorted(sizes)))} tokens, "
                f"found {length} from {start} of document {document}"
            )


def _require_one_of(field: str, value: int, expected: Collection[int]) -> None:
    if value not in expected:
        raise ValueError(f"{field}: the run's phases allow {', '.join(map(str, sorted(expected)))}, found {value}")


def _check_cursor(field: str, cursor: CursorState, chunks: ShuffledChunks) -> tuple[int, Ints]:
    """Check the position in one stream; lays out its block, as the next batch would.

    Returns:
        The tokens given out in its epoch, and the chunks given out of its block, the last one perhaps in part.
    """
    if cursor["block"] >= chunks.num_blocks:
        raise ValueError(f"{field}.block: the stream has {chunks.num_blocks} blocks, found {cursor['block']}")
    longest, taken, offset = cursor["laid_out_for"], cursor["taken"], cursor["offset"]
    block = np.empty((0, 3), np.int64)
    if taken or offset:
        if not longest:
            raise ValueError(f"{field}.laid_out_for: expected above 0 where something was taken, found 0")
        block = chunks.block(cursor["epoch"], cursor["block"], longest)
        if taken > len(block):
            raise ValueError(f"{field}.taken: the block has {len(block)} chunks, found {taken}")
        left = int(block[taken, 2]) if taken < len(block) else 1
        if offset >= left:
            raise ValueError(f"{field}.offset: expected less than the {left} tokens of the chunk, found {offset}")
        block = block[: taken + 1].copy()
        block[taken:, 2] = offset
    given_out = chunks.tokens_before(cursor["epoch"], cursor["block"]) + int(block[:, 2].sum())
    if cursor.get("given", given_out) != given_out:
        raise ValueError(
            f"{field}: epoch {cursor['epoch']}, block {cursor['block']}, {taken} chunks taken and offset {offset} are "
            f"{given_out} tokens of the epoch, and {field}.given is {cursor.get('given')}"
        )
    return given_out, block


def _check_chunks(
    packer: PackerState, cursors: Mapping[str, CursorState], streams: Mapping[str, ShuffledChunks], longest: int
) -> None:
    """Check that each chunk of a packer is part of a document that its stream has reached."""
    documents = sum(chunks.num_documents for chunks in streams.values())
    for field, (epoch, document, start, length) in _chunks(packer):
        if document >= documents:
            raise ValueError(f"{field}: there are {documents} documents, found number {document}")
        name, index = _stream_of(document, streams)
        document_tokens = streams[name].length_of(index)
        if not 0 < length <= longest or start + length > document_tokens:
            raise ValueError(
                f"{field}: expected 1 to {longest} tokens within the {document_tokens} of document {document}, "
                f"found {length} from {start}"
            )
        if epoch > cursors[name]["epoch"]:
            raise ValueError(f"{field}: stream {name} is in epoch {cursors[name]['epoch']}, found epoch {epoch}")


def _stream_of(document: int, streams: Mapping[str, ShuffledChunks]) -> tuple[str, int]:
    """Return the stream of a document, and its number within the stream."""
    ends = np.cumsum([chunks.num_documents for chunks in streams.values()])
    at = int(np.searchsorted(ends, document, side="right"))
    name = list(streams)[at]
    return name, document - int(ends[at]) + streams[name].num_documents


def _chunks(packer: PackerState) -> Iterator[tuple[str, ChunkState]]:
    for row_number, row in enumerate(packer["ready"]):
        for number, chunk in enumerate(row):
            yield f"packer.ready[{row_number}][{number}]", chunk
    for number, (_, chunk) in enumerate(packer["waiting"]):
        yield f"packer.waiting[{number}]", chunk
