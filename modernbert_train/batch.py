"""What data, objectives and models agree on: one microbatch of packed rows.

Shapes are static within a phase, so that a compiled model compiles once: the rows lie end to end in one packed
buffer of T tokens, `cu_seqlens` is padded with empty segments, and the predicted positions are padded with label -100.

Shape legend: T packed tokens, S sequences (padded), M predicted positions (padded).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_LABEL = -100
TENSORS = ("input_ids_T", "position_ids_T", "cu_seqlens_S", "positions_M", "labels_M")
_INDICES = ("input_ids_T", "position_ids_T", "positions_M", "labels_M")


@dataclass(frozen=True)
class Masked:
    """What an objective makes of a packed buffer: inputs (T), and the predicted positions (M) with their labels (M)."""

    input_ids_T: NDArray[np.int64]
    positions_M: NDArray[np.int64]
    labels_M: NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One microbatch on one rank.

    On its way from a worker to the device everything is int32, which halves what is copied; `to` widens on the device
    what torch indexes by.

    Attributes:
        input_ids_T: int64 token ids after masking. The unused tail of each row is its own sequence of pad tokens.
        position_ids_T: int64 positions, starting at 0 in each sequence.
        cu_seqlens_S: int32 boundaries of the sequences, from 0 to T; repeats of T pad it to a fixed length.
        max_seqlen: longest sequence that the phase allows (its row_tokens): constant, so that kernels do not recompile.
        positions_M: int64 indices into T that are predicted.
        labels_M: int64 original ids there; IGNORED_LABEL in the padding.
        num_tokens: tokens that are neither padding nor a padded tail.
        num_predicted: labels that are not IGNORED_LABEL.
        num_rows: packed rows in the microbatch.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens_S: Tensor
    max_seqlen: int
    positions_M: Tensor
    labels_M: Tensor
    num_tokens: int
    num_predicted: int
    num_rows: int

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in TENSORS}

    def numbers(self) -> dict[str, int]:
        """All that is not a tensor."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in TENSORS}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on a device, ready for the model."""
        moved: dict[str, Any] = {
            n: tensor.to(device, non_blocking=non_blocking) for n, tensor in self.tensors().items()
        }
        return replace(self, **{name: moved[name].long() if name in _INDICES else moved[name] for name in moved})

    def __deepcopy__(self, memo: object) -> Batch:
        """Itself: nothing changes a batch, and Composer 0.32.1 copies each microbatch, on the device, to keep it."""
        return self
