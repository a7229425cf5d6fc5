"""Decides, from document lengths alone, what every global batch is made of.

This is what makes a run exact. The planner sees no ranks, no workers and no tokens: it walks the shuffled pieces of
documents, packs their lengths into rows, and cuts the stream of rows into global batches by the clock. Every rank runs
the same planner (more than 100 million tokens a second) and reads only its own rows of each batch, so the sequence of
batches is the same for any number of ranks and workers, and the tokens of a batch are known everywhere without asking.

A phase with another row length begins a new epoch, because its pieces are cut anew; what the epoch before had left is
counted in `left_out`. Within a row length epochs follow each other without a seam.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.clock import position_at
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.packing import SPECIAL_TOKENS, GreedyPacker, Piece
from modernbert_train.data.shuffle import ShuffledPieces

Row = tuple[Piece, ...]
_SLICE = 4096  # pieces taken from a block's layout at a time


@dataclass(frozen=True)
class BatchPlan:
    """One global batch before any token is read.

    Attributes:
        phase: name of the phase.
        tokens_before: global tokens seen before this batch.
        tokens: tokens in it that are not padding, [CLS] and [SEP] included.
        rows: its rows, over all ranks.
        num_rows: their number.
        row_tokens: capacity of a row.
        microbatch_rows: rows in one forward on one rank.
        mask_rate: share of maskable tokens to predict.
        epoch: pass over the data that the planner stands in.
        left_out: tokens that passes still had when another row length ended them, over the run so far.
    """

    phase: str
    tokens_before: int
    tokens: int
    rows: tuple[Row, ...]
    num_rows: int
    row_tokens: int
    microbatch_rows: int
    mask_rate: float
    epoch: int = 0
    left_out: int = 0


class BatchPlanner:
    """The sequence of global batches of a run, up to the one that reaches its last token.

    Args:
        config: the run.
        pieces: the shuffled pieces of the training documents.

    Attributes:
        tokens: global tokens before the next batch.
        left_out: tokens that an epoch still had when another row length ended it, over the whole run.
    """

    def __init__(self, config: RunConfig, pieces: ShuffledPieces) -> None:
        self._config = config
        self._pieces = pieces
        self.tokens = 0
        self.left_out = 0
        self._epoch, self._block = 0, 0
        self._taken = 0  # pieces of the block already given to the packer
        self._placed = 0  # tokens of the epoch already given to the packer
        self._packer = self._new_packer(position_at(config, 0).phase.row_tokens)
        self._layout: NDArray[np.int64] | None = None
        self._next: list[list[int]] = []  # a slice of the layout, last first

    def __iter__(self) -> Iterator[BatchPlan]:
        return self

    def __next__(self) -> BatchPlan:
        if self.tokens >= self._config.total_tokens:
            raise StopIteration
        position = position_at(self._config, self.tokens)
        phase = position.phase
        if phase.row_tokens != self._packer.row_tokens:
            self._begin_row_tokens(phase.row_tokens)
        wanted = batch_rows_at(phase, position.tokens)
        while len(self._packer.ready) < wanted:
            self._packer.place(self._next_piece())
        rows = tuple(self._packer.ready.popleft() for _ in range(wanted))
        tokens = sum(piece.length + SPECIAL_TOKENS for row in rows for piece in row)
        plan = BatchPlan(
            phase=position.name,
            tokens_before=self.tokens,
            tokens=tokens,
            rows=rows,
            num_rows=len(rows),
            row_tokens=phase.row_tokens,
            microbatch_rows=phase.microbatch_rows,
            mask_rate=self._config.objective.mask_rate if phase.mask_rate is None else phase.mask_rate,
            epoch=self._epoch,
            left_out=self.left_out,
        )
        self.tokens += tokens
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, as JSON; its size does not grow with the position."""
        return {
            "tokens": self.tokens,
            "left_out": self.left_out,
            "epoch": self._epoch,
            "block": self._block,
            "taken": self._taken,
            "placed": self._placed,
            "packer": self._packer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same data, seed and packing settings; takes the same time at any position."""
        self.tokens, self.left_out = state["tokens"], state["left_out"]
        self._epoch, self._block, self._taken = state["epoch"], state["block"], state["taken"]
        self._placed = state["placed"]
        self._packer = self._new_packer(state["packer"]["row_tokens"])
        self._packer.load_state_dict(state["packer"])
        self._layout, self._next = None, []

    def _new_packer(self, row_tokens: int) -> GreedyPacker:
        return GreedyPacker(row_tokens, self._config.data.open_rows, self._config.data.max_open_rows_age)

    def _begin_row_tokens(self, row_tokens: int) -> None:
        self.left_out += self._pieces.num_tokens - self._placed + self._packer.num_waiting_tokens()
        self._packer = self._new_packer(row_tokens)
        self._begin_epoch()
        self._layout, self._next = None, []

    def _begin_epoch(self) -> None:
        self._epoch, self._block, self._taken, self._placed = self._epoch + 1, 0, 0, 0

    def _next_piece(self) -> Piece:
        while not self._next:
            if self._layout is None:
                piece_tokens = self._packer.row_tokens - SPECIAL_TOKENS
                self._layout = self._pieces.block(self._epoch, self._block, piece_tokens)
            self._next = self._layout[self._taken : self._taken + _SLICE].tolist()[::-1]
            if not self._next:
                self._layout, self._taken, self._block = None, 0, self._block + 1
                if self._block == self._pieces.num_blocks:
                    self._begin_epoch()
        self._taken += 1
        piece = Piece(self._epoch, *self._next.pop())
        self._placed += piece.length
        return piece
