"""The types that data, objectives and models exchange: text -> inputs -> one microbatch of packed rows -> sums.

Shapes are static within a phase, so that a compiled model compiles once: the rows lie end to end in one packed buffer
of T tokens, `cu_seqlens` is padded with empty segments, and an objective pads its targets to a fixed length.

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
WEIGHT_UNIT = 1 << 20  # weights of predictions travel as whole numbers of this unit: 1 to 1,000 fit 32 bits
QUERY_RANK = 1 << 30  # of a query token as a key: beyond every limit, so that nothing sees it


@dataclass(frozen=True)
class PackedText:
    """What an objective is given: the text of a microbatch, laid out, with room for its special tokens.

    Attributes:
        ids_T: int64. [CLS] stands before each sequence's text, and [SEP] after it, as often as the objective has
            special tokens more; pads fill the rows.
        starts_Q: int64 index of each sequence's first token of text, ascending.
        lengths_Q: int64 tokens of text, contiguous from there.
        keys_Q: uint64 key of each sequence, of its document and place in it.
        boundaries: of the sequences and of what pads the rows, from 0 to T.
        labels: of documents that have some: of each sequence [Q, L], or of each token of text, end to end; None: none.
        inside_words_T: whether a token continues a word of a segmenter's; None where the objective does not read that.
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
    """What tokens see in the order "given", and a packed buffer that is longer than the text.

    A token sees those of its sequence whose rank is below its limit. A query token stands at the end of its sequence,
    has the position of the token that it asks for, sees what it may know of it, and is seen by none.

    Attributes:
        position_ids_T: int64 positions in each sequence.
        boundaries: of the sequences, from 0 to T.
        ranks_T: int64 rank of each token as a key; `QUERY_RANK` of query tokens, and of what fills their number up.
        limits_T: int64 limit of each token as a query.
    """

    position_ids_T: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    ranks_T: NDArray[np.int64]
    limits_T: NDArray[np.int64]


@dataclass(frozen=True)
class Inputs:
    """What an objective makes of it: pure numpy, of static shapes.

    Attributes:
        ids_T: int64, what the encoder reads.
        targets: what the objective's module compares with, by name; integers that fit 32 bits.
        counts: loss term -> how many things it sums over here.
        segments_T: token types, 0 or 1; None: one segment.
        order: what a token sees of its sequence.
        given: in the order "given", what that is, and how the buffer is laid out; None: as the text was.
        boundaries: of the sequences, from 0 to T, where they are others than the text's; None: those.
        positions_T: int64 positions, where they begin again within a sequence; None: each goes on from 0 to its end.
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
    """What every encoder reads: sequences end to end in rows of fixed capacity.

    Attributes:
        input_ids_T: int64 token ids. The unused tail of each row is its own sequence of pad tokens.
        position_ids_T: int64 positions, starting at 0 in each sequence, and perhaps again within one. Windows and the
            causal order go by the place in the buffer.
        cu_seqlens_S: int32 boundaries of the sequences, from 0 to T; repeats of T pad it to a fixed length.
        max_seqlen: longest sequence that the phase allows (its row_tokens): constant, so that kernels do not recompile.
            Query tokens, which have a position among its own, are not counted.
        longest: no sequence here is longer, tails of rows included; often far below max_seqlen, and what the grid of a
            kernel must cover. None: max_seqlen.
        segment_ids_T: int64 token types, 0 or 1; None: one segment.
        order: what a token sees of its sequence.
        ranks_T, limits_T: int64, in the order "given" alone; see `Given`.
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
        """The same on a device, ready for an encoder."""
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.tensors().items()}
        ready: dict[str, Any] = {name: t if name == "cu_seqlens_S" else t.long() for name, t in moved.items()}
        return replace(self, **ready)

    def tensors(self) -> dict[str, Tensor]:
        """Those it has, by name."""
        return {name: value for name in _PACKED if (value := getattr(self, name)) is not None}


_PACKED = ("input_ids_T", "position_ids_T", "cu_seqlens_S", "segment_ids_T", "ranks_T", "limits_T")


@dataclass(frozen=True)
class Batch:
    """One microbatch on one rank.

    On its way from a worker to the device everything is int32, which halves what is copied; `to` widens on the device
    what torch indexes by.

    Attributes:
        packed: what the encoder reads.
        targets: made and read by one objective.
        counts: loss term -> how many things it sums over in this microbatch; known on the host before it is computed.
        num_tokens: tokens that are neither padding nor a padded tail, nor query tokens.
        num_rows: packed rows.
    """

    packed: Packed
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_rows: int = 0

    def tensors(self) -> list[Tensor]:
        """Those of `packed`, then the targets; `with_tensors` takes them in this order."""
        return [*self.packed.tensors().values(), *self.targets.values()]

    def with_tensors(self, tensors: Sequence[Any]) -> Batch:
        """The same batch with others, or what stands for them on the way, in the place of its tensors."""
        names = list(self.packed.tensors())
        packed: dict[str, Any] = dict(zip(names, tensors, strict=False))
        targets = dict(zip(self.targets, tensors[len(names) :], strict=True))
        return replace(self, packed=replace(self.packed, **packed), targets=targets)

    def with_targets(self, others: Mapping[str, Tensor]) -> Batch:
        """The same batch with these targets besides."""
        return replace(self, targets={**self.targets, **others})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on a device, ready for the model."""
        targets = {name: t.to(device, non_blocking=non_blocking).long() for name, t in self.targets.items()}
        return replace(self, packed=self.packed.to(device, non_blocking), targets=targets)


class Sums(NamedTuple):
    """What a microbatch comes to. Whoever asked divides, once, by the counts of everything it adds up.

    Attributes:
        losses: loss term -> fp32 scalar, the sum over its counts; 0 with a graph where there is nothing to sum.
        figures: other sums, such as hits; only where they are asked for. The name of each begins with its loss term
            and a slash.
        vectors: of an objective that compares texts of all microbatches, as long as it has not: what it compares.
        scale: of such an objective, [1], what it multiplies cosines by; None where that is not learnt.
    """

    losses: Mapping[str, Tensor]
    figures: Mapping[str, Tensor]
    vectors: Tensor | None = None
    scale: Tensor | None = None


def weighted(sums: Mapping[str, Tensor], terms: Mapping[str, float], counts: Mapping[str, float | Tensor]) -> Tensor:
    """The loss: each term's sum over its count, times its weight, added up."""
    first, *others = (sums[term] / counts[term] * weight for term, weight in terms.items())
    return sum(others, start=first)
