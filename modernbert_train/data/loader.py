"""Plans -> tokens -> masked microbatches, in worker processes that keep no state.

The main process plans; a worker turns one plan into one rank's microbatches, a pure function of the plan; the main
process hands them on in order and only then counts them as taken. So prefetching neither loses nor repeats anything,
and the number of workers cannot change a batch.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from modernbert_train.batch import IGNORED_LABEL, TENSORS, Batch, Masked
from modernbert_train.data.mixture import TokenStreams
from modernbert_train.data.packing import SPECIAL_TOKENS, Chunk
from modernbert_train.data.place import PlannerState
from modernbert_train.data.planner import BatchPlan, BatchPlanner, Row
from modernbert_train.data.workers import LOOK_SECONDS, deliveries
from modernbert_train.errors import RunError
from modernbert_train.keyed_random import Keys
from modernbert_train.ranks.orphans import die_with
from modernbert_train.vocabulary import Vocabulary


class Objective(Protocol):
    """What the loader needs of an objective; see objectives/mlm.py."""

    def corrupt(
        self, ids_T: NDArray[np.int64], starts_S: NDArray[Any], lengths_S: NDArray[Any], keys_S: Keys, mask_rate: float
    ) -> Masked: ...

    def max_predicted(self, mask_rate: float, tokens: int) -> int: ...


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a global batch, as microbatches, with what the plan says of the whole.

    Attributes:
        microbatches: what this rank computes in this step.
        plan: the global batch; its rows are left out, `num_rows` counts them.
    """

    microbatches: tuple[Batch, ...]
    plan: BatchPlan

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process as one tensor: each costs a connection of its own, a millisecond of the main process."""
        return _divide, (self._line(), self._sizes(), self.plan)

    def pin_memory(self) -> StepBatch:
        return _divide(self._line().pin_memory(), self._sizes(), self.plan)

    def _line(self) -> Tensor:
        """All tensors, end to end."""
        tensors = [(name, tensor) for batch in self.microbatches for name, tensor in batch.tensors().items()]
        other = {name: str(tensor.dtype) for name, tensor in tensors if tensor.dtype != torch.int32}
        if other:  # torch.cat would turn all of them into the widest: token ids into fp32, which has 24 bits
            raise TypeError(f"a batch travels as one int32 tensor, and these are not: {other}")
        return torch.cat([tensor for _, tensor in tensors])

    def _sizes(self) -> list[tuple[list[int], dict[str, int]]]:
        """Of each microbatch the lengths of its tensors, and all that is not a tensor."""
        return [([len(t) for t in batch.tensors().values()], batch.numbers()) for batch in self.microbatches]


def _divide(line: Tensor, sizes: list[tuple[list[int], dict[str, int]]], plan: BatchPlan) -> StepBatch:
    """The batch whose tensors are views of the line."""
    tensors = iter(line.split([length for lengths, _ in sizes for length in lengths]))
    microbatches = []
    for _, numbers in sizes:
        values: dict[str, Any] = {name: next(tensors) for name in TENSORS}
        microbatches.append(Batch(**values | numbers))
    return StepBatch(tuple(microbatches), plan)


class MicrobatchMaker:
    """Reads, lays out and masks the rows of a plan.

    Args:
        streams: where the tokens are; masks are keyed by the seeds of the streams.
        objective: what is predicted.
        vocabulary: ids of the special tokens.
    """

    def __init__(self, streams: TokenStreams, objective: Objective, vocabulary: Vocabulary) -> None:
        self._streams = streams
        self._objective = objective
        self._vocabulary = vocabulary

    def microbatches(self, rows: tuple[Row, ...], plan: BatchPlan) -> Iterator[Batch]:
        """The given rows in order, plan.microbatch_rows at a time."""
        for first in range(0, len(rows), plan.microbatch_rows):
            yield self._make(rows[first : first + plan.microbatch_rows], plan.row_tokens, plan.mask_rate)

    def stream_of(self, document: int) -> str:
        """Name of the stream that a document belongs to."""
        return self._streams.stream_of(document)

    def _make(self, rows: tuple[Row, ...], row_tokens: int, mask_rate: float) -> Batch:
        total = len(rows) * row_tokens
        ids = np.full(total, self._vocabulary.pad_id, dtype=np.int64)
        boundaries = [0]
        starts: list[int] = []
        chunks: list[Chunk] = []
        for number, row in enumerate(rows):
            at = number * row_tokens
            for chunk in row:
                text = self._streams.read(chunk.document)[chunk.start : chunk.start + chunk.length]
                ids[at] = self._vocabulary.cls_id
                ids[at + 1 : at + 1 + len(text)] = text
                ids[at + 1 + len(text)] = self._vocabulary.sep_id
                starts.append(at + 1)
                chunks.append(chunk)
                at += len(text) + SPECIAL_TOKENS
                boundaries.append(at)
            if at < (number + 1) * row_tokens:
                boundaries.append((number + 1) * row_tokens)
        lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
        keys = self._streams.mask_keys(chunks)
        masked = self._objective.corrupt(ids, np.array(starts, dtype=np.int64), lengths, keys, mask_rate)

        cu_seqlens = np.full(_next_power_of_two(len(boundaries)), total, dtype=np.int32)
        cu_seqlens[: len(boundaries)] = boundaries
        sizes = np.diff(boundaries)
        positions = np.arange(total) - np.repeat(boundaries[:-1], sizes)
        bound = self._objective.max_predicted(mask_rate, total)
        predicted = len(masked.labels_M)
        assert predicted <= bound, f"{predicted} predicted positions exceed the bound of {bound}"
        return Batch(
            input_ids_T=_narrow(masked.input_ids_T),
            position_ids_T=_narrow(positions),
            cu_seqlens_S=torch.from_numpy(cu_seqlens),
            max_seqlen=row_tokens,
            positions_M=_narrow(np.pad(masked.positions_M, (0, bound - predicted))),
            labels_M=_narrow(np.pad(masked.labels_M, (0, bound - predicted), constant_values=IGNORED_LABEL)),
            num_tokens=int(lengths.sum()) + SPECIAL_TOKENS * len(chunks),
            num_predicted=predicted,
            num_rows=len(rows),
        )


def _narrow(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def share_of_rank(rows: tuple[Row, ...], rank: int, num_ranks: int, microbatch_rows: int) -> tuple[Row, ...]:
    """One rank's rows of a global batch: every num_ranks-th microbatch of it.

    So microbatches are the same for any number of ranks, and dropout keyed by them is too. Where they cannot be shared
    evenly, every num_ranks-th row.
    """
    block = 1 if len(rows) % (microbatch_rows * num_ranks) else microbatch_rows
    firsts = range(rank * block, len(rows), num_ranks * block)
    return tuple(row for first in firsts for row in rows[first : first + block])


class PackedLoader:
    """The batches of one rank, endless up to the run's last token, exactly resumable.

    Args:
        planner: decides the global batches; every rank has its own equal one.
        maker: turns rows into microbatches.
        rank, num_ranks: see `share_of_rank`.
        num_workers: worker processes; 0 works in this process.
        prefetch_batches: batches each worker prepares ahead.
        worker_timeout_seconds: longest wait for a batch of a worker.

    Attributes:
        rows: what this rank's share of the batch last taken is made of; for naming its documents.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        maker: MicrobatchMaker,
        *,
        rank: int,
        num_ranks: int,
        num_workers: int,
        prefetch_batches: int,
        worker_timeout_seconds: float = 300.0,
    ) -> None:
        self._planner = planner
        self._maker = maker
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_workers = num_workers
        self._prefetch_batches = prefetch_batches
        self._worker_timeout_seconds = worker_timeout_seconds
        self._taken = planner.state_dict()
        self._ahead: deque[tuple[tuple[Row, ...], BatchPlan]] = deque()  # planned, and not given out
        # state after each planned batch, until it is taken
        self._planned: deque[tuple[PlannerState, tuple[Row, ...]]] = deque()
        self.rows: tuple[Row, ...] = ()

    def __iter__(self) -> Iterator[StepBatch]:
        self._planner.load_state_dict(self._taken)
        self._planned.clear()
        self._ahead.clear()
        loader = DataLoader(
            _RankRows(self._maker),
            batch_size=None,
            sampler=_Plans(self),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_batches if self._num_workers else None,
            timeout=LOOK_SECONDS if self._num_workers else 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # its own, so that starting to iterate draws nothing from the global one
        )
        for batch in deliveries(loader, self._worker_timeout_seconds):
            if isinstance(batch, RunError):
                raise batch
            self._taken, self.rows = self._planned.popleft()
            yield batch

    def plans(self) -> Iterator[tuple[tuple[Row, ...], BatchPlan]]:
        """This rank's rows of each batch to come."""
        while True:
            self.plan_ahead()
            if not self._ahead:
                return
            yield self._ahead.popleft()

    def plan_ahead(self) -> None:
        """Plan a batch before it is asked for, unless that was done. It makes no difference but in time.

        Every rank plans the whole batch: tens of milliseconds for millions of tokens, which are free while the device
        is busy and dear when it waits for its next batch.
        """
        plan = None if self._ahead else next(self._planner, None)
        if plan is not None:
            rows = share_of_rank(plan.rows, self._rank, self._num_ranks, plan.microbatch_rows)
            self._planned.append((self._planner.state_dict(), rows))
            self._ahead.append((rows, replace(plan, rows=())))

    def stream_of(self, document: int) -> str:
        """Name of the stream that a document belongs to."""
        return self._maker.stream_of(document)

    def state_dict(self) -> PlannerState:
        """Where the first batch that was not taken starts; the same on every rank."""
        return self._taken

    def load_state_dict(self, state: PlannerState) -> None:
        """Start the next iteration there. The number of ranks and workers may have changed.

        Raises:
            ValueError: see `BatchPlanner.load_state_dict`.
        """
        self._planner.load_state_dict(state)
        self._taken = state


def _begin_worker(parent: int, worker: int) -> None:
    """A worker ends with its run, however that ends, and leaves signals to it.

    Ctrl-C, or a signal to all processes of a job, must not take a worker away while the run finishes its step.

    Slurm sends SIGUSR1 before a time limit, and SIGTERM before it takes a machine away, to every process there is.
    """
    die_with(parent)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # the first is the run's; whoever means this worker asks twice, as multiprocessing does at the end, or kills
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _Plans:
    """The loader's plans, as the sampler of a DataLoader; they never leave the main process."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[tuple[Row, ...], BatchPlan]]:
        return self._loader.plans()


class _RankRows(Dataset[StepBatch | RunError]):
    """Turns a plan into microbatches; what runs in the workers.

    Errors for the user are returned, not raised: torch would wrap the message into a worker's traceback.
    """

    def __init__(self, maker: MicrobatchMaker) -> None:
        self._maker = maker

    def __getitem__(self, item: tuple[tuple[Row, ...], BatchPlan]) -> StepBatch | RunError:
        rows, plan = item
        try:
            return StepBatch(tuple(self._maker.microbatches(rows, plan)), plan)
        except RunError as error:
            return error
