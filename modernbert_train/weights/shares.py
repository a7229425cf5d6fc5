"""Each rank's share of a checkpoint: a pure function of shapes and ranks, so every row has exactly one writer.

A rank writes the rows of a sharded tensor that it holds, and nothing is gathered. Rows that several ranks hold (all
ranks under DDP, one per replica under HSDP) are divided among those ranks; a small tensor is written whole by one of
them, chosen round-robin. So each rank writes about as many bytes, and needs host memory only for its share.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from modernbert_train.checkpoints.checkpoint import Share
from modernbert_train.errors import ConfigError
from modernbert_train.models.sharding import held_rows, holders

_MIN_BYTES = 1 << 16  # smallest slice; smaller tensors are not divided
_ALIGNED = 64  # alignment of a tensor in memory, in bytes


class Rows(NamedTuple):
    """Rows of a tensor: the first one, their number, and how many rows this rank holds before them."""

    first: int
    rows: int
    held_before: int


def share_of(tensor: Tensor, turn: int, rank: int, writers: Sequence[int], num_ranks: int) -> Rows | None:
    """Return the rows of a tensor that a rank writes.

    Args:
        tensor: whole or a DTensor.
        turn: number of the tensor among all, for the round-robin of small ones.
        rank: this rank.
        writers: ranks that write.
        num_ranks: of the run.

    Returns:
        None if other ranks write all rows that this rank holds, or it holds none.
    """
    first, held = held_rows(tensor)
    if held == 0:
        return None
    writing = set(writers)
    able = [each for each in holders(tensor, num_ranks) if each in writing]
    if rank not in able:
        return None
    size = tensor.element_size() * held * math.prod(tensor.shape[1:])
    num_shares = max(1, min(len(able), held, -(-size // _MIN_BYTES)))
    part = (able.index(rank) - turn) % len(able)
    each = -(-held // num_shares)
    before = each * part
    return Rows(first + before, min(each, held - before), before) if before < held and part < num_shares else None


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name, as this rank holds it; tied ones once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def moments_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield optimizer state as `<key>/<parameter name>`, as this rank holds it; step counts as scalars."""
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{key}/{name}", value.detach() if isinstance(value, Tensor) else torch.tensor(value)


class _Memory:
    """Host memory for tensors, in one allocation.

    Pinned here instead of by torch, whose allocator rounds each request up to a power of two: 1.7 times a share's
    bytes, tensor by tensor.

    Args:
        layout: shapes and dtypes of the tensors.
        pinned: lets a GPU copy into it while it computes.

    Attributes:
        tensors: views, in the order of the layout.
    """

    def __init__(self, layout: list[tuple[torch.Size, torch.dtype]], *, pinned: bool) -> None:
        self.layout = layout
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in layout]
        starts = [0, *accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        if pinned and starts[-1]:
            pages = mmap.mmap(-1, starts[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(mmap.MADV_DONTFORK)  # else forking a data worker would separate these pages from the GPU's
            memory = torch.frombuffer(pages, dtype=torch.uint8)
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), starts[-1], 0)))
            release: Any = weakref.finalize(self, cudart.cudaHostUnregister, memory.data_ptr())
            release.atexit = False  # the end of the process unpins it
        else:
            memory = torch.empty(starts[-1], dtype=torch.uint8)
        self.tensors = [
            memory[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in zip(starts, sizes, layout, strict=False)
        ]


@dataclass
class _Group:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    slices: dict[str, tuple[int, int]] = field(default_factory=dict)


class Copier:
    """Copy this rank's share into host memory, reusing the same memory; pinned if it comes from a GPU.

    Args:
        rank, writers, num_ranks: see `share_of`.
    """

    def __init__(self, rank: int, writers: Sequence[int], num_ranks: int) -> None:
        self._rank, self._writers, self._num_ranks = rank, list(writers), num_ranks
        self._memory = _Memory([], pinned=False)
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if no rank that writes holds the rows of this one."""
        for name, parameter in model.named_parameters():
            able = holders(parameter, self._num_ranks)
            if not set(able) & set(self._writers):
                raise ConfigError(
                    f"rank {self._rank} holds rows of {name}, and no rank that holds them sees the run's folder of "
                    "rank 0, so no checkpoint would be whole. Put runs_folder on a file system that all machines "
                    "share; or set distributed.strategy=hsdp with distributed.shard_ranks of one machine, or ddp."
                )

    @torch.no_grad()
    def copy(self, model: nn.Module, optimizer: Optimizer) -> tuple[Share | None, int]:
        """Return this rank's share and the bytes of all ranks together. A GPU copies asynchronously; see `wait`."""
        self._follow_device(next(model.parameters()).device)
        weights, moments = _Group(), _Group()
        total, turn = 0, 0
        mine_of_all: list[tuple[_Group, str, Tensor]] = []
        for group, entries in ((weights, weights_of(model)), (moments, moments_of(model, optimizer))):
            for name, tensor in entries:
                total += tensor.numel() * tensor.element_size()
                mine = share_of(tensor, turn, self._rank, self._writers, self._num_ranks)
                turn += 1
                if mine is None:
                    continue
                held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                rows = held[mine.held_before : mine.held_before + mine.rows] if held.ndim else held
                mine_of_all.append((group, name, rows))
                if tensor.ndim and mine.rows < tensor.shape[0]:
                    group.slices[name] = (mine.first, tensor.shape[0])
        layout = [(rows.shape, rows.dtype) for _, _, rows in mine_of_all]
        if self._memory.layout != layout:
            self._memory = _Memory(layout, pinned=self._stream is not None)
        for (group, name, rows), copy_memory in zip(mine_of_all, self._memory.tensors, strict=True):
            group.tensors[name] = self._copied(rows, copy_memory)
        if self._stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self._stream)
        if self._rank not in self._writers:
            return None, total
        suffix = f"-{self._rank:05d}" if len(self._writers) > 1 else ""
        return Share(weights.tensors, moments.tensors, weights.slices, moments.slices, suffix), total

    def _follow_device(self, device: torch.device) -> None:
        """Order the copy stream after the work that the GPU has queued so far."""
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _copied(self, rows: Tensor, memory: Tensor) -> Tensor:
        if self._stream is None or rows.device.type == "cpu":  # step counts are on the CPU even with a GPU
            return memory.copy_(rows)
        with torch.cuda.stream(self._stream):
            memory.copy_(rows, non_blocking=True)
        rows.record_stream(self._stream)  # they may be freed before the copy: a new phase drops the moments
        return memory

    def wait(self) -> None:
        """Wait until the copies are done; for the thread that writes them."""
        if self._done is not None and self._stream is not None:
            # a thread starts on GPU 0, and waiting there would take half a gigabyte of it for every rank of a machine
            torch.cuda.set_device(self._stream.device)
            self._done.synchronize()

    def before_update(self) -> None:
        """Make the device, not the host, wait for the copies before its next work; then weights may change."""
        if self._done is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
