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
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from modernbert_train.batch import IGNORED_LABEL, Batch, Masked
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.packing import SPECIAL_TOKENS, Piece
from modernbert_train.data.planner import BatchPlan, BatchPlanner, Row
from modernbert_train.errors import DataError, RunError
from modernbert_train.keyed import Keys, derive, derive_each
from modernbert_train.vocabulary import Vocabulary

WORKER_TIMEOUT_SECONDS = 300
_MASKS = 3


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

    def pin_memory(self) -> StepBatch:
        return replace(self, microbatches=tuple(batch.pin_memory() for batch in self.microbatches))


class MicrobatchMaker:
    """Reads, lays out and masks the rows of a plan.

    Args:
        shards: where the tokens are.
        objective: what is predicted.
        vocabulary: ids of the special tokens.
        seed: the run's seed; masks are keyed by it.
    """

    def __init__(self, shards: TokenShards, objective: Objective, vocabulary: Vocabulary, seed: int) -> None:
        self._shards = shards
        self._objective = objective
        self._vocabulary = vocabulary
        self._mask_key = derive(seed, _MASKS)

    def microbatches(self, rows: tuple[Row, ...], plan: BatchPlan) -> Iterator[Batch]:
        """The given rows in order, plan.microbatch_rows at a time."""
        for first in range(0, len(rows), plan.microbatch_rows):
            yield self._make(rows[first : first + plan.microbatch_rows], plan.row_tokens, plan.mask_rate)

    def _make(self, rows: tuple[Row, ...], row_tokens: int, mask_rate: float) -> Batch:
        total = len(rows) * row_tokens
        ids = np.full(total, self._vocabulary.pad_id, dtype=np.int64)
        borders = [0]
        starts: list[int] = []
        pieces: list[Piece] = []
        for number, row in enumerate(rows):
            at = number * row_tokens
            for piece in row:
                text = self._shards.read(piece.document)[piece.start : piece.start + piece.length]
                ids[at] = self._vocabulary.cls_id
                ids[at + 1 : at + 1 + len(text)] = text
                ids[at + 1 + len(text)] = self._vocabulary.sep_id
                starts.append(at + 1)
                pieces.append(piece)
                at += len(text) + SPECIAL_TOKENS
                borders.append(at)
            if at < (number + 1) * row_tokens:
                borders.append((number + 1) * row_tokens)
        columns = np.array(pieces, dtype=np.int64).reshape(-1, len(Piece._fields))
        epochs, documents, piece_starts, lengths = columns.T
        keys = derive_each(self._mask_key, epochs, documents, piece_starts)
        masked = self._objective.corrupt(ids, np.array(starts, dtype=np.int64), lengths, keys, mask_rate)

        cu_seqlens = np.full(_next_power_of_two(len(borders)), total, dtype=np.int32)
        cu_seqlens[: len(borders)] = borders
        sizes = np.diff(borders)
        positions = np.arange(total) - np.repeat(borders[:-1], sizes)
        bound = self._objective.max_predicted(mask_rate, total)
        predicted = len(masked.labels_M)
        assert predicted <= bound, f"{predicted} predicted positions exceed the bound of {bound}"
        return Batch(
            input_ids_T=torch.from_numpy(masked.input_ids_T),
            position_ids_T=torch.from_numpy(positions),
            cu_seqlens_S=torch.from_numpy(cu_seqlens),
            max_seqlen=row_tokens,
            positions_M=torch.from_numpy(np.pad(masked.positions_M, (0, bound - predicted))),
            labels_M=torch.from_numpy(
                np.pad(masked.labels_M, (0, bound - predicted), constant_values=IGNORED_LABEL),
            ),
            num_tokens=int(lengths.sum()) + SPECIAL_TOKENS * len(pieces),
            num_predicted=predicted,
            num_rows=len(rows),
        )


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class PackedLoader:
    """The batches of one rank, endless up to the run's last token, exactly resumable.

    Args:
        planner: decides the global batches; every rank has its own equal one.
        maker: turns rows into microbatches.
        rank, num_ranks: rows j of a batch with j mod num_ranks = rank are this rank's.
        num_workers: worker processes; 0 works in this process.
        prefetch_batches: batches each worker prepares ahead.
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
    ) -> None:
        self._planner = planner
        self._maker = maker
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_workers = num_workers
        self._prefetch_batches = prefetch_batches
        self._taken = planner.state_dict()
        self._planned: deque[dict[str, Any]] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        self._planner.load_state_dict(self._taken)
        self._planned.clear()
        loader = DataLoader(
            _RankRows(self._maker),
            batch_size=None,
            sampler=_Plans(self),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_batches if self._num_workers else None,
            timeout=WORKER_TIMEOUT_SECONDS if self._num_workers else 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_leave_signals_to_the_run,
            generator=torch.Generator(),  # its own, so that starting to iterate draws nothing from the global one
        )
        batches = iter(loader)
        while True:
            try:
                batch = next(batches, None)
            except (RuntimeError, OSError, EOFError) as error:
                if self._num_workers == 0 or not _tells_of_a_lost_worker(error):
                    raise
                _abandon(batches)
                raise RunError(
                    f"a data worker is gone, or silent for {WORKER_TIMEOUT_SECONDS} s ({error}). If the machine ran "
                    "out of memory, lower data.num_workers or data.prefetch_batches; the same command goes on from the "
                    "newest checkpoint."
                ) from error
            if batch is None:
                return
            if isinstance(batch, DataError):
                raise batch
            self._taken = self._planned.popleft()
            yield batch

    def plans(self) -> Iterator[tuple[tuple[Row, ...], BatchPlan]]:
        """This rank's rows of each batch to come; remembers the state after each until the batch is taken."""
        for plan in self._planner:
            self._planned.append(self._planner.state_dict())
            yield plan.rows[self._rank :: self._num_ranks], replace(plan, rows=())

    def state_dict(self) -> dict[str, Any]:
        """Where the first batch that was not taken starts; the same on every rank."""
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration there. The number of ranks and workers may have changed."""
        self._taken = state


def _tells_of_a_lost_worker(error: Exception) -> bool:
    """Torch says so itself, or the pipe to the worker breaks; an error raised in a worker reads `Caught ...`."""
    return not isinstance(error, RuntimeError) or str(error).startswith("DataLoader")


def _abandon(batches: Any) -> None:
    """Kill what is left of the workers; torch's orderly shutdown can wait for ever on a lock that a dead one held."""
    torch._C._remove_worker_pids(id(batches))  # or torch would report these deaths too
    for worker in getattr(batches, "_workers", ()):
        worker.kill()
    batches._shutdown = True


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C, or a signal to the whole group, must not take a worker away while the run finishes its step."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # not the run's own handler, which a forked process inherits


class _Plans:
    """The loader's plans, as the sampler of a DataLoader; they never leave the main process."""

    def __init__(self, loader: PackedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[tuple[Row, ...], BatchPlan]]:
        return self._loader.plans()


class _RankRows(Dataset[StepBatch | DataError]):
    """Turns a plan into microbatches; what runs in the workers.

    Bad data is returned, not raised: torch would wrap the message for the user into a worker's traceback.
    """

    def __init__(self, maker: MicrobatchMaker) -> None:
        self._maker = maker

    def __getitem__(self, item: tuple[tuple[Row, ...], BatchPlan]) -> StepBatch | DataError:
        rows, plan = item
        try:
            return StepBatch(tuple(self._maker.microbatches(rows, plan)), plan)
        except DataError as error:
            return error
