"""A place in the data as JSON, as a checkpoint holds it, and whether the data have such a place.

What is not looked at here would be found in the middle of the first batch, as an index beyond an array, or worse, as
text that is skipped without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from modernbert_train.config.schema import DataConfig, PhaseConfig
from modernbert_train.core.read_json import Count
from modernbert_train.data.packing import ChunkState, PackerState
from modernbert_train.data.shuffle import CursorState, ShuffledChunks

LONGEST_ROW = 1 << 24  # tokens; a row longer than a text of 64 MB is a mistake
_MOST_EPOCHS = 1 << 31


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


def check_numbers(
    state: PlannerState, data: DataConfig, phases: Collection[PhaseConfig], special_tokens: int, *, own: bool
) -> None:
    """Make sure that planning could have made the numbers of a place; the data are not asked.

    Row lengths and ages of a run that began at a checkpoint of another may be that one's, so of these only the size is
    looked at.

    Args:
        state: of the types that it declares.
        data, phases: that were saved with it.
        special_tokens: that each chunk gets.
        own: the run did not begin at another's checkpoint.

    Raises:
        ValueError: it could not; names the field and its value.
    """
    special, rows = special_tokens, {phase.row_tokens for phase in phases}

    def is_row(tokens: int) -> bool:
        return tokens in rows if own else special < tokens <= LONGEST_ROW

    for name, cursor in state["streams"].items():
        at = f"streams.{name}"
        if cursor["laid_out_for"]:
            _require(is_row(cursor["laid_out_for"] + special), f"{at}.laid_out_for", cursor["laid_out_for"])
            _require(cursor["offset"] < cursor["laid_out_for"], f"{at}.offset", cursor["offset"])
        else:  # a block that is not laid out gave nothing out
            _require(cursor["taken"] == 0 == cursor["offset"], f"{at}.laid_out_for", 0)
    packer = state["packer"]
    _require(is_row(packer["row_tokens"]), "packer.row_tokens", packer["row_tokens"])
    oldest = data.max_wait_rows + data.packing_window if own else LONGEST_ROW
    for number, (age, _) in enumerate(packer["waiting"]):
        _require(age <= oldest, f"packer.waiting[{number}]", age)
    longest = 1 if data.mix_by == "documents" and own else max(rows) if own else LONGEST_ROW
    most = sum(state["weights"]) * longest  # see mixing.py
    _require(all(abs(lag) <= most for lag in state["lag"]), "lag", state["lag"])


def check_place(
    state: PlannerState, streams: Mapping[str, ShuffledChunks], special_tokens: int, most_epochs: int | None = None
) -> None:
    """Make sure that the data have a place.

    Args:
        state: of the types that it declares.
        streams: the shuffled chunks of each stream, in the order in which their documents are numbered.
        special_tokens: that each chunk gets.
        most_epochs: that were left before their end, by phases that begin a new one; None if what was drawn so far
            is not known, as in a run that began with the place of another.

    Raises:
        ValueError: they have not; names the field and its value.
    """
    if state["streams"].keys() != streams.keys():
        raise ValueError(f"streams: expected {', '.join(streams)}, found {', '.join(state['streams'])}")
    for name, cursor in state["streams"].items():
        _check_cursor(cursor, streams[name], f"streams.{name}")
        if most_epochs is not None:
            whole = max(0, cursor["epoch"] - most_epochs) * streams[name].num_tokens
            _require(whole <= state["tokens"] + _held(state["packer"]), f"streams.{name}.epoch", cursor["epoch"])
    weights, lag = state["weights"], state["lag"]
    _require(len(weights) == len(streams) and min(weights) >= 0 < max(weights), "weights", weights)
    _require(len(lag) == len(streams) and sum(lag) == 0, "lag", lag)
    epochs = [state["streams"][name]["epoch"] for name in streams]
    _check_packer(state["packer"], list(streams.values()), epochs, special_tokens)


def _check_cursor(cursor: CursorState, stream: ShuffledChunks, at: str) -> None:
    _require(cursor["epoch"] <= _MOST_EPOCHS, f"{at}.epoch", cursor["epoch"])
    _require(cursor["block"] < stream.num_blocks, f"{at}.block", cursor["block"])
    if cursor["taken"] or cursor["offset"]:
        chunks_C3 = stream.block(cursor["epoch"], cursor["block"], cursor["laid_out_for"])
        _require(cursor["taken"] <= len(chunks_C3), f"{at}.taken", cursor["taken"])
        if cursor["offset"]:
            inside = cursor["taken"] < len(chunks_C3) and cursor["offset"] < chunks_C3[cursor["taken"], 2]
            _require(bool(inside), f"{at}.offset", cursor["offset"])


def _held(packer: PackerState) -> int:
    """Tokens that were drawn and wait for a row or a batch."""
    ready = sum(chunk[3] for row in packer["ready"] for chunk in row)
    return ready + sum(chunk[3] for _, chunk in packer["waiting"])


def _check_packer(
    packer: PackerState, streams: Sequence[ShuffledChunks], epochs: Sequence[int], special_tokens: int
) -> None:
    row_tokens = packer["row_tokens"]
    _require(row_tokens > special_tokens, "packer.row_tokens", row_tokens)
    for number, row in enumerate(packer["ready"]):
        at = f"packer.ready[{number}]"
        taken = sum(special_tokens + _check_chunk(chunk, streams, epochs, at) for chunk in row)
        _require(0 < taken <= row_tokens, at, row)
    for number, (_, chunk) in enumerate(packer["waiting"]):
        at = f"packer.waiting[{number}]"
        _require(special_tokens + _check_chunk(chunk, streams, epochs, at) <= row_tokens, at, chunk)


def _check_chunk(chunk: ChunkState, streams: Sequence[ShuffledChunks], epochs: Sequence[int], at: str) -> int:
    """Tokens of a chunk's text."""
    epoch, document, start, length = chunk
    for stream, latest in zip(streams, epochs, strict=True):
        if document < stream.num_documents:
            _require(epoch <= latest, at, chunk)
            _require(0 < length <= stream.length_of(document) - start, at, chunk)
            return length
        document -= stream.num_documents
    raise _no_place(at, chunk)


def _require(holds: bool, at: str, value: object) -> None:
    if not holds:
        raise _no_place(at, value)


def _no_place(at: str, value: object) -> ValueError:
    return ValueError(f"{at}: no such place in the data, found {str(value)[:60]}")
