"""Turn rows of a plan into microbatches: read tokens, lay them out, and mask. A pure function of the rows.

The share of each rank is decided here too, so that microbatches are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from modernbert_train.batch import Batch, Inputs, Packed, PackedText
from modernbert_train.config.schema import ObjectiveConfig
from modernbert_train.core.keyed_random import Keys
from modernbert_train.data.packing import Chunk
from modernbert_train.data.planner import BatchPlan, Row
from modernbert_train.vocabulary import Vocabulary

# Attention kernels launch ceil(longest / TILE) blocks for each sequence and head, padding sequences included, and the
# backward pass allocates TILE rows for each. So both numbers are kept close to the real ones; they may vary without
# cost, since no graph depends on them.
BOUNDARIES = 64  # the number of boundaries is padded to a multiple of this, or below it to a power of two
TILE = 128

KEPT_OBJECTIVES = 4  # of the phases on both sides of a boundary, and of validation


class Objective(Protocol):
    """The interface of objectives that a maker uses; see objectives/."""

    def make(self, text: PackedText, settings: Any) -> Inputs: ...


class Documents(Protocol):
    """Source of tokens; see `TokenStreams`."""

    def read(self, document: int) -> NDArray[Any]: ...

    def inside_words(self, document: int) -> NDArray[Any]: ...

    def mask_keys(self, chunks: Sequence[Chunk]) -> Keys: ...

    def labels(self, chunks: Sequence[Chunk]) -> NDArray[Any] | None: ...


class MicrobatchMaker:
    """Reads, lays out and masks the rows of a plan.

    Args:
        documents: numbered as in the chunks.
        build_objective: builds the objective of a section of the configuration.
        vocabulary: ids of the special tokens.
    """

    def __init__(
        self, documents: Documents, build_objective: Callable[[ObjectiveConfig], Objective], vocabulary: Vocabulary
    ) -> None:
        self._documents = documents
        self._build_objective = build_objective
        self._objectives: dict[ObjectiveConfig, Objective] = {}
        self._vocabulary = vocabulary

    def microbatches(self, rows: Sequence[Row], plan: BatchPlan) -> Iterator[Batch]:
        """Yield microbatches of the given rows in order, plan.microbatch_rows at a time."""
        for first in range(0, len(rows), plan.microbatch_rows):
            yield self._make(rows[first : first + plan.microbatch_rows], plan.row_tokens, plan.objective)

    def _make(self, rows: Sequence[Row], row_tokens: int, settings: ObjectiveConfig) -> Batch:
        total, closing = len(rows) * row_tokens, settings.special_tokens - 1
        longest = min(row_tokens, settings.sequence_tokens or row_tokens)
        ids = np.full(total, self._vocabulary.pad_id, dtype=np.int64)
        inside = np.zeros(total, dtype=bool) if settings.reads_words else None
        ends = [0]
        starts: list[int] = []
        chunks: list[Chunk] = []
        for number, row in enumerate(rows):
            at = number * row_tokens
            for chunk in row:
                text = self._documents.read(chunk.document)[chunk.start : chunk.start + chunk.length]
                end = at + 1 + len(text)
                ids[at] = self._vocabulary.cls_id
                ids[at + 1 : end] = text
                if inside is not None:
                    words = self._documents.inside_words(chunk.document)
                    inside[at + 1 : end] = words[chunk.start : chunk.start + chunk.length]
                ids[end : end + closing] = self._vocabulary.sep_id
                starts.append(at + 1)
                chunks.append(chunk)
                at = end + closing
                ends.append(at)
            if at < (end_of_row := (number + 1) * row_tokens):  # pad the tail with sequences no longer than the others
                ends += [*range(at + longest, end_of_row, longest), end_of_row]
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        packed_text = PackedText(
            ids,
            np.array(starts, dtype=np.int64),
            lengths,
            self._documents.mask_keys(chunks),
            np.array(ends, dtype=np.int64),
            self._documents.labels(chunks) if settings.reads_labels else None,
            inside,
        )
        inputs = self._objective(settings).make(packed_text, settings)

        given = inputs.given
        if given is None:
            boundaries = packed_text.boundaries if inputs.boundaries is None else inputs.boundaries
            positions = inputs.positions_T
            if positions is None:
                positions = np.arange(total) - np.repeat(boundaries[:-1], np.diff(boundaries))
        else:
            boundaries, positions = given.boundaries, given.position_ids_T
        padded = min(_multiple(len(boundaries), BOUNDARIES), 1 << (len(boundaries) - 1).bit_length())
        cu_seqlens = np.full(padded, len(inputs.ids_T), dtype=np.int32)
        cu_seqlens[: len(boundaries)] = boundaries
        packed = Packed(
            input_ids_T=_narrow(inputs.ids_T),
            position_ids_T=_narrow(positions),
            cu_seqlens_S=torch.from_numpy(cu_seqlens),
            max_seqlen=longest if np.diff(boundaries).max() <= longest else row_tokens,
            segment_ids_T=None if inputs.segments_T is None else _narrow(inputs.segments_T),
            order=inputs.order,
            ranks_T=None if given is None else _narrow(given.ranks_T),
            limits_T=None if given is None else _narrow(given.limits_T),
            longest=min(row_tokens, _multiple(int(np.diff(boundaries).max()), TILE)) if given is None else None,
        )
        return Batch(
            packed,
            targets={name: _narrow(values) for name, values in inputs.targets.items()},
            counts=inputs.counts,
            num_tokens=int(lengths.sum()) + settings.special_tokens * len(chunks),
            num_rows=len(rows),
        )

    def _objective(self, settings: ObjectiveConfig) -> Objective:
        """Return the objective built from these settings, and keep the last few.

        A rate that moves through a phase changes the settings in each batch, and an objective has tables as large as
        the vocabulary.
        """
        objective = self._objectives.pop(settings) if settings in self._objectives else self._build_objective(settings)
        self._objectives[settings] = objective  # most recently used last
        if len(self._objectives) > KEPT_OBJECTIVES:
            del self._objectives[next(iter(self._objectives))]
        return objective


def _narrow(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def share_of_rank(rows: Sequence[Row], rank: int, num_ranks: int, microbatch_rows: int) -> tuple[Row, ...]:
    """Return one rank's rows of a global batch: every num_ranks-th microbatch of it.

    So microbatches, and dropout keyed by them, are the same for any number of ranks. If their number is not a multiple
    of num_ranks, return every num_ranks-th row.
    """
    block = 1 if len(rows) % (microbatch_rows * num_ranks) else microbatch_rows
    firsts = range(rank * block, len(rows), num_ranks * block)
    return tuple(row for first in firsts for row in rows[first : first + block])
