"""Decides, from document lengths alone, what every global batch is made of.

This is what makes a run exact. The planner sees no ranks, no workers and no tokens: it walks the shuffled documents,
packs their lengths into rows, and cuts the stream of rows into global batches by the clock. Every rank runs the same
planner (a few hundred million tokens a second) and reads only its own rows of each batch, so the sequence of batches
is the same for any number of ranks and workers, and the tokens of a batch are known everywhere without asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from modernbert_train.clock import position_at
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.packing import SPECIAL_TOKENS, GreedyPacker, Piece
from modernbert_train.data.shuffle import DocumentOrder

Row = tuple[Piece, ...]


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
    """

    phase: str
    tokens_before: int
    tokens: int
    rows: tuple[Row, ...]
    num_rows: int
    row_tokens: int
    microbatch_rows: int
    mask_rate: float


class BatchPlanner:
    """The sequence of global batches of a run, up to the one that reaches its last token.

    Args:
        config: the run.
        lengths: tokens of each document, special tokens not included.
        order: the shuffled documents.
    """

    def __init__(self, config: RunConfig, lengths: NDArray[Any], order: DocumentOrder) -> None:
        self._config = config
        self._lengths = lengths
        self._order = order
        self.tokens = 0
        self._packer = self._new_packer(position_at(config, 0).phase.row_tokens)
        self._epoch = 0
        self._index = 0  # documents of this epoch already given to the packer
        self._block: list[tuple[int, int]] = []  # (document, length) of the rest of the current block, last first

    def __iter__(self) -> Iterator[BatchPlan]:
        return self

    def __next__(self) -> BatchPlan:
        if self.tokens >= self._config.total_tokens:
            raise StopIteration
        position = position_at(self._config, self.tokens)
        phase = position.phase
        if phase.row_tokens != self._packer.row_tokens:
            self._packer = self._packer.with_row_tokens(phase.row_tokens)
        wanted = batch_rows_at(phase, position.tokens)
        while len(self._packer.ready) < wanted:
            self._add_document()
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
        )
        self.tokens += tokens
        return plan

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, as JSON; its size does not grow with the position."""
        return {
            "tokens": self.tokens,
            "epoch": self._epoch,
            "index": self._index,
            "packer": self._packer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same data, seed and packing settings; takes the same time at any position."""
        self.tokens, self._epoch, self._index = state["tokens"], state["epoch"], state["index"]
        self._block = []
        self._packer = self._new_packer(state["packer"]["row_tokens"])
        self._packer.load_state_dict(state["packer"])

    def _new_packer(self, row_tokens: int) -> GreedyPacker:
        return GreedyPacker(row_tokens, self._config.data.open_rows, self._config.data.max_open_rows_age)

    def _add_document(self) -> None:
        if not self._block:
            if self._index == self._order.num_documents:
                self._epoch, self._index = self._epoch + 1, 0
            documents = self._order.documents_from(self._epoch, self._index)[::-1]
            self._block = list(zip(documents.tolist(), self._lengths[documents].tolist(), strict=True))
        document, length = self._block.pop()
        self._index += 1
        self._packer.add(self._epoch, document, length)
