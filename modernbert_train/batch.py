"""The types that data, objectives and models exchange: text -> inputs -> one microbatch of packed rows -> sums.

Shapes are static within a phase, so a compiled model compiles once: rows are concatenated to one packed buffer of T
tokens, `cu_seqlens` is padded with empty segments, and objectives pad their targets to a fixed length.
Shape legend: T packed tokens, S sequences (padded), Q sequences of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train.config.objective import Order as Order
from modernbert_train.core.keyed_random import Keys

IGNORED_LABEL = -100
WEIGHT_UNIT = 1 << 20  # weights of predictions are stored as multiples of 1 / WEIGHT_UNIT: 1 to 1,000 fit 32 bits
QUERY_RANK = 1 << 30  # rank of a query token as a key: above every limit, so that no token sees it


@dataclass(frozen=True)
class PackedText:
    """An objective's input: the packed text of a microbatch, with room for special tokens.

    Attributes:
        ids_T: int64. Each sequence's text has [CLS] before it and [SEP] after it, one for each further special token of
            the objective; pads fill the rows.
        starts_Q: int64 index of each sequence's first token of text, ascending.
        lengths_Q: int64 tokens of text, contiguous from there.
        keys_Q: uint64 key of each sequence, by its document and position in it.
        boundaries: of the sequences and of the rows' padding, from 0 to T.
        labels: of labelled documents: for each sequence [Q, L], or for each token of text, concatenated; else None.
        inside_words_T: True for tokens that continue a segmenter's word; None if the objective does not use it.
    """

    ids_T: NDArray[np.int64]
    starts_Q: NDArray[np.int64]
    lengths_Q: NDArray[np.int64]
    keys_Q: Keys
    boundaries: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    labels: NDArray[Any] | None = None
    inside_words_T: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Given:
    """Visibility in the order "given", and a packed buffer that is longer than the text.

    A token sees the tokens of its sequence whose rank is below its limit. A query token is at the end of its sequence,
    has the position of the token that it predicts, sees what that token may see, and is seen by none.

    Attributes:
        position_ids_T: int64 positions in each sequence.
        boundaries: of the sequences, from 0 to T.
        ranks_T: int64 rank of each token as a key; `QUERY_RANK` for query tokens and their padding.
        limits_T: int64 limit of each token as a query.
    """

    position_ids_T: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    ranks_T: NDArray[np.int64]
    limits_T: NDArray[np.int64]


@dataclass(frozen=True)
class Inputs:
    """An objective's output: numpy arrays of static shapes.

    Attributes:
        ids_T: int64, the encoder's input.
        targets: for the objective's heads, by name; integers that fit 32 bits.
        counts: loss term -> number of items in its sum.
        segments_T: token types, 0 or 1; None: one segment.
        order: which tokens of its sequence a token sees.
        given: for the order "given", the visibility and layout of the buffer; None: the text's layout.
        boundaries: of the sequences, from 0 to T, if they differ from the text's; else None.
        positions_T: int64 positions, if they restart within a sequence; None: each sequence counts from 0 to its end.
    """

    ids_T: NDArray[np.int64]
    targets: Mapping[str, NDArray[np.int64]]
    counts: Mapping[str, int]
    segments_T: NDArray[np.int64] | None = None
    order: Order = "all"
    given: Given | None = None
    boundaries: NDArray[np.int64] | None = None
    positions_T: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Packed:
    """Input of every encoder: concatenated sequences in rows of fixed capacity.

    Attributes:
        input_ids_T: int64 token ids. The unused tail of each row is a separate sequence of pad tokens.
        position_ids_T: int64 positions, starting at 0 in each sequence; may restart within one. Windows and the causal
            order use the index in the buffer instead.
        cu_seqlens_S: int32 boundaries of the sequences, from 0 to T; repeats of T pad it to a fixed length.
        max_seqlen: longest sequence that the phase allows (its row_tokens): constant, so that kernels do not recompile.
            Query tokens, which repeat positions, are not counted.
        longest: upper bound of the sequences' lengths here, tails of rows included; often far below max_seqlen, and
            enough for a kernel's grid. None: max_seqlen.
        segment_ids_T: int64 token types, 0 or 1; None: one segment.
        order: which tokens of its sequence a token sees.
        ranks_T, limits_T: int64, only in the order "given"; see `Given`.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S: Tensor
    max_seqlen: int
    segment_ids_T: Tensor | None = None
    order: Order = "all"
    ranks_T: Tensor | None = None
    limits_T: Tensor | None = None
    longest: int | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Packed:
        """Return it on a device, ready for an encoder."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors().items()}
        ready: dict[str, Any] = {name: t if name == "cu_seqlens_S" else t.long() for name, t in moved.items()}
        return replace(self, **ready)

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name, without missing ones."""
        return {name: value for name in _PACKED if (value := getattr(self, name)) is not None}


_PACKED = ("input_ids_T", "position_ids_T", "cu_seqlens_S", "segment_ids_T", "ranks_T", "limits_T")


@dataclass(frozen=True)
class Batch:
    """One microbatch on one rank.

    Between worker and device everything is int32, which halves the copied bytes; `to` converts index tensors to int64
    on the device.

    Attributes:
        packed: the encoder's input.
        targets: made and read by one objective.
        counts: loss term -> number of items in its sum in this microbatch; known on the host before the forward pass.
        num_tokens: tokens that are neither padding nor query tokens.
        num_rows: packed rows.
    """

    packed: Packed
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_rows: int = 0

    def tensors(self) -> list[Tensor]:
        """Return the tensors of `packed`, then the targets; `with_tensors` expects this order."""
        return [*self.packed.tensors().values(), *self.targets.values()]

    def with_tensors(self, tensors: Sequence[Any]) -> Batch:
        """Copy of the batch with its tensors (or their pickling placeholders) replaced."""
        names = list(self.packed.tensors())
        packed: dict[str, Any] = dict(zip(names, tensors, strict=False))
        targets = dict(zip(self.targets, tensors[len(names) :], strict=True))
        return replace(self, packed=replace(self.packed, **packed), targets=targets)

    def with_targets(self, others: Mapping[str, Tensor]) -> Batch:
        """Copy of the batch with further targets."""
        return replace(self, targets={**self.targets, **others})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Return the batch on a device, ready for the model."""
        targets = {name: t.to(device, non_blocking=non_blocking).long() for name, t in self.targets.items()}
        return replace(self, packed=self.packed.to(device, non_blocking), targets=targets)


class Sums(NamedTuple):
    """Loss sums of one microbatch; the caller divides once by the global counts.

    Attributes:
        losses: loss term -> fp32 scalar, the sum over its counts; if there is nothing to sum, 0 with a graph.
        figures: other sums, such as hits, if they were requested. Each name begins with its loss term and a slash.
        vectors: for an objective that compares texts of all microbatches, the vectors before the comparison.
        scale: for such an objective, [1], the factor of cosines; None if it is not learned.
    """

    losses: Mapping[str, Tensor]
    figures: Mapping[str, Tensor]
    vectors: Tensor | None = None
    scale: Tensor | None = None


def weighted(sums: Mapping[str, Tensor], terms: Mapping[str, float], counts: Mapping[str, float | Tensor]) -> Tensor:
    """Return the loss: each term's sum over its count, times its weight, added up."""
    first, *others = (sums[term] / counts[term] * weight for term, weight in terms.items())
    return sum(others, start=first)
