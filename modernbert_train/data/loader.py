"""Turn plans into one rank's batches, in stateless worker processes.

The main process plans; a worker turns one plan into one rank's microbatches (microbatches.py), a pure function of the
plan; the main process returns them in order and only then counts them as consumed. So prefetching neither loses nor
repeats a batch, and the number of workers cannot change one.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from modernbert_train.batch import Batch
from modernbert_train.data.microbatches import MicrobatchMaker, share_of_rank
from modernbert_train.data.planner import BatchPlan, BatchPlanner, Row
from modernbert_train.data.planner_state import PlannerState
from modernbert_train.data.workers import LOOK_SECONDS, deliveries
from modernbert_train.distributed.orphans import die_with
from modernbert_train.errors import RunError


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a global batch, as microbatches, with the global plan.

    Attributes:
        microbatches: this rank's work in this step.
        plan: the global batch, without its rows; `num_rows` counts them.
        rows: this rank's rows, in the order of the microbatches, which name the documents. The main process adds them
            on delivery, since it planned them; workers do not send them back.
    """

    microbatches: tuple[Batch, ...]
    plan: BatchPlan
    rows: tuple[Row, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as one tensor: each tensor costs a connection, a millisecond of the main process."""
        return _divide, (self._joined(), self._sizes(), self.plan)

    def pin_memory(self) -> StepBatch:
        return _divide(self._joined().pin_memory(), self._sizes(), self.plan)

    def _joined(self) -> Tensor:
        """Return all tensors, concatenated."""
        tensors = [tensor for batch in self.microbatches for tensor in batch.tensors()]
        other = {str(tensor.dtype) for tensor in tensors if tensor.dtype != torch.int32}
        if other:  # torch.cat would promote all to the widest type: token ids to fp32, which has 24 bits
            raise TypeError(f"a batch travels as one int32 tensor, and it has others: {sorted(other)}")
        return torch.cat(tensors)

    def _sizes(self) -> list[tuple[list[int], Batch]]:
        """Return, for each microbatch, the lengths of its tensors and a copy of it without them."""
        lengths = [[len(tensor) for tensor in batch.tensors()] for batch in self.microbatches]
        return [
            (each, batch.with_tensors([0] * len(each))) for each, batch in zip(lengths, self.microbatches, strict=True)
        ]


def _divide(joined: Tensor, sizes: list[tuple[list[int], Batch]], plan: BatchPlan) -> StepBatch:
    """Rebuild the batch with views of the concatenated tensor."""
    tensors = iter(joined.split([length for lengths, _ in sizes for length in lengths]))
    microbatches = [empty.with_tensors([next(tensors) for _ in lengths]) for lengths, empty in sizes]
    return StepBatch(tuple(microbatches), plan)


class PackedLoader:
    """The batches of one rank, epoch after epoch up to the run's last token; exactly resumable.

    Args:
        planner: decides the global batches; every rank has an equal one.
        maker: turns rows into microbatches.
        rank, num_ranks: see `share_of_rank`.
        num_workers: worker processes; 0 works in this process.
        prefetch_batches: batches that each worker prepares ahead.
        worker_timeout_seconds: longest wait for a worker's batch.
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
        self._ahead: deque[tuple[tuple[Row, ...], BatchPlan]] = deque()  # planned, not yet yielded
        # state after each planned batch, and its rows, until it is consumed
        self._planned: deque[tuple[PlannerState, tuple[Row, ...]]] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        self._planner.load_state_dict(self._taken)
        self._planned.clear()
        self._ahead.clear()
        self.plan_ahead()  # compiles the planner's loop now, which would delay the watchdog of workers.py later
        loader = DataLoader(
            _RankRows(self._maker),
            batch_size=None,
            sampler=_Plans(self),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_batches if self._num_workers else None,
            timeout=LOOK_SECONDS if self._num_workers else 0,
            pin_memory=torch.cuda.is_initialized(),  # with compute.device=cpu, do not touch an installed GPU
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # so that iterating draws nothing from the global generator
        )
        for batch in deliveries(loader, self._worker_timeout_seconds):
            if isinstance(batch, RunError):
                raise batch
            self._taken, rows = self._planned.popleft()
            yield replace(batch, rows=rows)

    def plans(self) -> Iterator[tuple[tuple[Row, ...], BatchPlan]]:
        """Yield this rank's rows of each coming batch, with its plan."""
        while True:
            self.plan_ahead()
            if not self._ahead:
                return
            yield self._ahead.popleft()

    def plan_ahead(self) -> None:
        """Plan a batch before it is needed, unless that was done; changes timing only.

        Every rank plans the whole batch: tens of milliseconds for millions of tokens, free while the device is busy and
        expensive when it waits for its next batch.
        """
        plan = None if self._ahead else next(self._planner, None)
        if plan is not None:
            rows = share_of_rank(plan.rows, self._rank, self._num_ranks, plan.microbatch_rows)
            self._planned.append((self._planner.state_dict(), rows))
            self._ahead.append((rows, replace(plan, rows=())))

    def state_dict(self) -> PlannerState:
        """Return the start of the first batch that was not consumed; the same on every rank."""
        return self._taken

    def load_state_dict(self, state: PlannerState) -> None:
        """Start the next iteration at a state. The number of ranks and workers may have changed.

        Raises:
            ValueError: see `BatchPlanner.load_state_dict`.
        """
        self._planner.load_state_dict(state)
        self._taken = state


def _begin_worker(parent: int, worker: int) -> None:
    """Make a worker end with its run, for any reason, and ignore stop signals.

    Ctrl-C, or a signal to all processes of a job, must not kill a worker while the run finishes its step. Slurm sends
    SIGUSR1 before a time limit, and SIGTERM before it takes a machine away, to every process.
    """
    die_with(parent)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # the first is the run's; to end a worker, send a second one, as multiprocessing does, or kill it
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _Plans:
    """The loader's plans, as the sampler of a DataLoader; they stay in the main process."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[tuple[Row, ...], BatchPlan]]:
        return self._loader.plans()


class _RankRows(Dataset[StepBatch | RunError]):
    """Turns a plan into microbatches inside a worker.

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
