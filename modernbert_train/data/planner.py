"""Decide the contents of every global batch from document lengths alone.

This makes a run exact. The planner sees no ranks, no workers and no tokens: it reads the shuffled chunks of each
stream, takes the next from the stream that the fair queue chooses, packs their lengths into rows, and cuts the sequence
of rows into global batches by the clock. With batches of one source, each stream has separate rows, and the chosen
stream fills the whole batch. Every rank runs the same planner (more than a billion tokens a second) and reads only its
own rows of each batch. So the sequence of batches is the same for any number of ranks and workers, and every rank knows
the tokens of a batch without communication.

Nothing is dropped: epochs follow each other without a gap. If a phase changes the row length, waiting chunks are cut if
they must be and packed again, and the cursors stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from modernbert_train.clock import Clock, Position
from modernbert_train.config.schema import ContrastiveConfig, DataConfig, ObjectiveConfig, PhaseConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.mixing import FairQueue, phase_weights
from modernbert_train.data.packing import Chunk, ChunkState, GreedyPacker, Ints, PackerState, Row
from modernbert_train.data.planner_state import PlannerState, check_state
from modernbert_train.data.shuffle import ChunkCursor, ShuffledChunks

__all__ = ["BatchPlan", "BatchPlanner", "Row", "StreamCount"]
_AT_ONCE = 4096  # chunks passed to the compiled loop, which reserves memory for rows of all of them
_MAX_EXACT = 1 << 62  # up to this bound the compiled loop computes the queue's products exactly


class StreamCount(NamedTuple):
    """A stream's share of a batch.

    Attributes:
        name: of the stream.
        epoch: the planner's current pass over the stream.
        tokens: of its text in the batch, without special tokens.
        documents: that start in the batch.
    """

    name: str
    epoch: int
    tokens: int
    documents: int


@dataclass(frozen=True)
class BatchPlan:
    """One global batch before any token is read.

    Attributes:
        phase: name of the phase.
        tokens_before: global tokens seen before this batch.
        tokens: tokens in it without padding, [CLS] and [SEP] included.
        rows: its rows, over all ranks.
        num_rows: their number.
        row_tokens: capacity of a row.
        microbatch_rows: rows in one forward on one rank.
        objective: applied to its text.
        streams: its share of each stream of the training data.
        unused: tokens that were drawn and still wait for a row, in the run's last batch, or in the last batch of a
            phase before one that cannot use them; else 0.
    """

    phase: str
    tokens_before: int
    tokens: int
    rows: Sequence[Row]
    num_rows: int
    row_tokens: int
    microbatch_rows: int
    objective: ObjectiveConfig
    streams: tuple[StreamCount, ...] = ()
    unused: int = 0


class BatchPlanner:
    """The sequence of global batches of a run, up to the one that reaches its last token.

    Args:
        data: the run's section.
        clock: its phases.
        streams: the shuffled chunks of each stream, by name, in the order in which their documents are numbered.
        is_branch: True if the run may continue from another run's position in the data.

    Attributes:
        tokens: global tokens before the next batch.
    """

    def __init__(
        self, data: DataConfig, clock: Clock, streams: Mapping[str, ShuffledChunks], *, is_branch: bool = False
    ) -> None:
        self._data, self._clock, self._is_branch = data, clock, is_branch
        self._special = clock.phases[0].objective.special_tokens  # the same in all phases
        self._names = list(streams)
        self._chunks = streams
        self._cursors: list[ChunkCursor] = []
        documents, firsts = 0, []
        for chunks in streams.values():
            firsts.append(documents)
            self._cursors.append(ChunkCursor(chunks, documents))
            documents += chunks.num_documents
        self._first_documents = np.array(firsts, dtype=np.int64)  # of each stream
        self._drawn: _Drawn | None = None  # taken from the cursors, which count them only when they are given out
        self._by_documents = data.mix_by == "documents"
        own = {n: p.num_documents if self._by_documents else p.num_tokens for n, p in streams.items()}
        self._weights = [list(phase_weights(data, each.phase, own).values()) for each in clock.phases]
        self._total = clock.total_tokens
        self.tokens = 0
        self._phase: str | None = None  # of the last batch
        self._now: _Now | None = None  # constant within the phase; None: not yet looked up
        self._queue = FairQueue(self._weights[0])
        # one packer for all streams, or one for each with batches of one source
        self._packers = [self._new_packer(clock.phases[0].phase.row_tokens)]

    def __iter__(self) -> Iterator[BatchPlan]:
        return self

    def __next__(self) -> BatchPlan:
        before = self.tokens
        if before >= self._total:
            raise StopIteration
        now = self._now
        if now is None or before >= now.end:
            now = self._now = self._enter(self._clock.at(before))
        num_rows = batch_rows_at(now.phase, before - now.first)
        source = self._fill(now, num_rows)
        rows, counts = self._packers[source].take_rows(num_rows, self._first_documents)
        if len(self._packers) > 1:  # `_fill` chose by a full batch; the share is kept by what this one really took
            self._queue.count(source, int(counts[source, int(self._by_documents)]))
        streams = tuple(
            StreamCount(name, cursor.epoch, tokens, documents)
            for name, cursor, (tokens, documents) in zip(self._names, self._cursors, counts.tolist(), strict=True)
        )
        tokens = sum([stream.tokens for stream in streams]) + self._special * len(rows.chunks_C4)
        self.tokens = before + tokens
        last = self.tokens >= self._total or (self.tokens >= now.end and self._parts(now.name, self.tokens))
        return BatchPlan(
            phase=now.name,
            tokens_before=before,
            tokens=tokens,
            rows=rows,
            num_rows=num_rows,
            row_tokens=now.row_tokens,
            microbatch_rows=now.microbatch_rows,
            objective=now.objective.at((before - now.first) / now.phase.tokens),
            streams=streams,
            unused=sum(chunk.length for chunk in self._waiting()) if last else 0,
        )

    def state_dict(self) -> PlannerState:
        """Return the start of the next batch as JSON; its size does not grow with the position."""
        return {
            "tokens": self.tokens,
            "phase": self._phase,
            "streams": {name: cursor.state_dict() for name, cursor in zip(self._names, self._cursors, strict=True)},
            "weights": list(self._queue.weights),
            "lag": list(self._queue.lag),
            "packer": self._joined(),
        }

    def load_state_dict(self, state: PlannerState) -> None:
        """Continue from a state of the same data, seed and packing settings; takes the same time at any position.

        Raises:
            ValueError: the position does not exist in the data; names the field.
        """
        phases = None if self._is_branch else {each.name: each.phase for each in self._clock.phases}
        check_state(state, self._chunks, self._special, phases)
        self.tokens, self._phase, self._now, self._drawn = state["tokens"], state["phase"], None, None
        for name, cursor in zip(self._names, self._cursors, strict=True):
            cursor.load_state_dict(state["streams"][name])
        self._queue = FairQueue(state["weights"])  # as saved: if the phase now has others, `_enter` starts a new queue
        self._queue.lag = list(state["lag"])
        objective = (self._clock.phases[0] if self._phase is None else self._clock.phase(self._phase)).objective
        self._packers = self._new_packers(state["packer"]["row_tokens"], objective)
        for packer, part in zip(self._packers, self._parted(state["packer"]), strict=True):
            packer.load_state_dict(part)

    def _new_packer(self, row_tokens: int) -> GreedyPacker:
        return GreedyPacker(row_tokens, self._data.packing_window, self._data.max_wait_rows, self._special)

    def _new_packers(self, row_tokens: int, objective: ObjectiveConfig) -> list[GreedyPacker]:
        apart = objective.compares and cast(ContrastiveConfig, objective).one_source
        return [self._new_packer(row_tokens) for _ in (self._names if apart else ("all",))]

    def _packer_of(self, document: int) -> int:
        """Return the index of the packer that holds a document, by the document's number."""
        several = len(self._packers) > 1
        return int(np.searchsorted(self._first_documents, document, side="right")) - 1 if several else 0

    def _waiting(self) -> list[Chunk]:
        return [chunk for packer in self._packers for chunk in packer.waiting()]

    def _joined(self) -> PackerState:
        """Return all packers' states as one; `_parted` separates them by the chunks' documents."""
        states = [packer.state_dict() for packer in self._packers]
        return {
            "row_tokens": states[0]["row_tokens"],
            "ready": [row for state in states for row in state["ready"]],
            "waiting": [each for state in states for each in state["waiting"]],
        }

    def _parted(self, joined: PackerState) -> list[PackerState]:
        ready: list[list[list[ChunkState]]] = [[] for _ in self._packers]
        waiting: list[list[tuple[int, ChunkState]]] = [[] for _ in self._packers]
        for row in joined["ready"]:
            ready[self._packer_of(row[0][1])].append(row)
        for age, chunk in joined["waiting"]:
            waiting[self._packer_of(chunk[1])].append((age, chunk))
        tokens = joined["row_tokens"]
        return [{"row_tokens": tokens, "ready": r, "waiting": w} for r, w in zip(ready, waiting, strict=True)]

    def _enter(self, position: Position) -> _Now:
        """Switch to the phase of the next batch: its passes, shares and row length."""
        phase, objective = position.phase, position.objective
        if position.name != self._phase:
            if phase.restart_data and self._phase is not None:
                for cursor in self._cursors:
                    cursor.begin_epoch()
            if self._phase is not None and self._parts(self._phase, self.tokens):
                # waiting chunks are dropped here; the phase's last batch has counted them as unused
                self._packers = self._new_packers(phase.row_tokens, objective)
            self._phase, self._drawn = position.name, None
        if self._weights[position.index] != self._queue.weights:
            self._queue = FairQueue(self._weights[position.index])
        max_tokens = phase.row_tokens - self._special
        for cursor in self._cursors:
            cursor.allow(max_tokens)
        packers = self._new_packers(phase.row_tokens, objective)
        if phase.row_tokens != self._packers[0].row_tokens or len(packers) != len(self._packers):
            # also the chunks of finished rows, which have the old length
            waiting, self._packers = self._waiting(), packers
            for chunk in waiting:
                for part in chunk.cut(max_tokens):
                    packers[self._packer_of(chunk.document)].place(part)
        weights = self._queue.weights
        return _Now(
            name=position.name,
            phase=phase,
            first=self.tokens - position.tokens,
            end=self.tokens - position.tokens + phase.tokens,
            row_tokens=phase.row_tokens,
            microbatch_rows=phase.microbatch_rows,
            objective=objective,
            used=[index for index, weight in enumerate(weights) if weight],
            max_drawn=sum(weights) * max_tokens,
        )

    def _parts(self, name: str, tokens: int) -> bool:
        """Return True if the phase at `tokens` compares pairs of texts and the phase before reads text, or vice versa:
        waiting chunks cannot be used there."""
        return self._clock.phase(name).objective.compares != self._clock.at(tokens).objective.compares

    def _fill(self, now: _Now, num_rows: int) -> int:
        """Draw chunks until a packer has `wanted` rows ready; return its index."""
        if len(self._packers) > 1:
            # a batch's tokens are known once it is packed; until then all streams would give a full one
            source = self._queue.next([num_rows * now.row_tokens] * len(self._cursors))
            self._fill_from(self._cursors[source], self._packers[source], num_rows)
            return source
        if len(now.used) == 1:
            self._fill_from(self._cursors[now.used[0]], self._packers[0], num_rows)
        else:
            self._fill_in_turn(now, num_rows)
        return 0

    def _fill_from(self, cursor: ChunkCursor, packer: GreedyPacker, num_rows: int) -> None:
        while packer.num_ready < num_rows:
            chunks_C3 = cursor.whole_chunks()
            if len(chunks_C3):
                some_C3 = chunks_C3[:_AT_ONCE]
                cursor.skip(packer.place_many(some_C3, cursor.epoch, cursor.first_document, num_rows))
            else:
                packer.place(cursor.take())

    def _fill_in_turn(self, now: _Now, num_rows: int) -> None:
        packer, queue, used = self._packers[0], self._queue, now.used
        cursors = [self._cursors[index] for index in used]
        # lags move by at most max_drawn a chunk, but may be larger from a phase with longer rows
        exact = now.max_drawn + max(max(queue.lag), -min(queue.lag)) < _MAX_EXACT
        while packer.num_ready < num_rows:
            drawn = self._drawn = (self._drawn or _draw(cursors)) if exact else None
            if drawn is not None:
                lag, before = np.array([queue.lag[index] for index in used]), drawn.at.copy()
                weights = np.array([queue.weights[index] for index in used])  # fit int64, since `exact`
                packer.mix_many(drawn.chunks_C3, (*drawn.columns, self._by_documents, weights, lag), num_rows)
                for cursor, number in zip(cursors, (drawn.at - before).tolist(), strict=True):
                    cursor.skip(number)
                for index, new in zip(used, lag.tolist(), strict=True):
                    queue.lag[index] = new
                if (drawn.at == drawn.ends).any():  # the queue compares the next chunk of every stream
                    self._drawn = None
            else:  # a chunk must be cut, or numbers are too large
                unit = int(self._by_documents)  # index into next_size: tokens, documents
                sizes = [0] * len(queue.weights)
                for index, cursor in zip(used, cursors, strict=True):
                    sizes[index] = cursor.next_size()[unit]
                packer.place(self._cursors[queue.give(sizes)].take())
        if self._drawn is None:  # otherwise no cursor is at the end of its block
            for cursor in cursors:
                cursor.look()


@dataclass(frozen=True)
class _Now:
    """Values that are constant from the first batch of a phase, or of a start, to the last of the phase.

    Attributes:
        name, phase: of the phase.
        first, end: global tokens at which the phase begins and ends.
        row_tokens, microbatch_rows, objective: see `BatchPlan`.
        used: indices of the streams with a share.
        max_drawn: largest change of the queue's numbers by one chunk.
    """

    name: str
    phase: PhaseConfig
    first: int
    end: int
    row_tokens: int
    microbatch_rows: int
    objective: ObjectiveConfig
    used: list[int]
    max_drawn: int


@dataclass(frozen=True)
class _Drawn:
    """Chunks of several streams that can be given out uncut.

    Attributes:
        chunks_C3: of all streams, concatenated.
        at: the next chunk of each stream; changed as they are given out.
        ends: end of each stream's chunks.
        columns: these two, then each stream's epoch and first document.
    """

    chunks_C3: Ints
    at: Ints
    ends: Ints
    columns: tuple[Ints, ...]


def _draw(cursors: Sequence[ChunkCursor]) -> _Drawn | None:
    """Return some of the next chunks of each stream; None if one must be cut first."""
    upcoming = [cursor.whole_chunks()[:_AT_ONCE] for cursor in cursors]
    sizes = np.array(list(map(len, upcoming)))
    if not sizes.all():
        return None
    ends = np.cumsum(sizes)
    at = ends - sizes
    epochs = np.array([cursor.epoch for cursor in cursors])
    firsts = np.array([cursor.first_document for cursor in cursors])
    return _Drawn(np.concatenate(upcoming), at, ends, (at, ends, epochs, firsts))
