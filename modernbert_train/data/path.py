"""Wire the data path: shards -> mixture -> shuffle -> planner -> maker -> loader.

Training uses all of it (`open_path(...).loader`), `inspect` looks at its batches, and `plan` uses lengths only
(`plan_path`). torch and streaming are imported where text is read, so plans do not need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from modernbert_train.clock import Clock
from modernbert_train.config.schema import DataConfig, ObjectiveConfig
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.mixture import TokenStreams, stream_seed
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.shuffle import ShuffledChunks

if TYPE_CHECKING:
    from modernbert_train.data.loader import PackedLoader
    from modernbert_train.data.microbatches import MicrobatchMaker, Objective


class DocumentLengths(Protocol):
    """The interface of a folder of shards that planning uses."""

    @property
    def shard_documents(self) -> NDArray[np.int64]:
        """Number of documents in each shard."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens of each document, in the order of the shards."""


Lengths = TypeVar("Lengths", bound=DocumentLengths)


class Planned(NamedTuple):
    """The half of the path that works without text.

    Attributes:
        chunks: of each stream, by name, in their order.
        planner: of the run's batches, at the first one.
    """

    chunks: Mapping[str, ShuffledChunks]
    planner: BatchPlanner


def plan_path(
    data: DataConfig,
    seed: int,
    clock: Clock,
    folders: Mapping[str, Lengths],
    shuffle: Callable[[Lengths, int, int], ShuffledChunks] | None = None,
    *,
    is_branch: bool = False,
) -> Planned:
    """Plan the run's batches from document lengths.

    Args:
        data, seed: of the run.
        clock: its phases.
        folders: of each stream, by name, in the order in which documents are numbered.
        shuffle: (folder, shards shuffled together, seed) -> chunks. None uses lengths only and fetches nothing.
        is_branch: True if the run may continue from another run's position in the data.
    """
    block_shards = data.shuffle_block_shards
    chunks = {
        name: (shuffle or _shuffle_lengths)(folder, block_shards, stream_seed(data, seed, name))
        for name, folder in folders.items()
    }
    return Planned(chunks, BatchPlanner(data, clock, chunks, is_branch=is_branch))


def _shuffle_lengths(folder: DocumentLengths, block_shards: int, seed: int) -> ShuffledChunks:
    return ShuffledChunks(folder.shard_documents, folder.lengths, block_shards, seed, folder.tokens)


@dataclass(frozen=True)
class DataPath:
    """The whole path, open.

    Attributes:
        data: the run's section.
        streams: its documents.
        planned: their order, and the batches made from it.
        maker: turns rows of a batch into microbatches.
    """

    data: DataConfig
    streams: TokenStreams
    planned: Planned
    maker: MicrobatchMaker

    def loader(self, rank: int, num_ranks: int) -> PackedLoader:
        """Return one rank's training batches; the loader owns the planner from then on."""
        from modernbert_train.data.loader import PackedLoader

        data = self.data
        return PackedLoader(
            self.planned.planner,
            self.maker,
            rank=rank,
            num_ranks=num_ranks,
            num_workers=data.workers,
            prefetch_batches=data.prefetch_batches,
            worker_timeout_seconds=data.worker_timeout_seconds,
        )


def open_path(
    data: DataConfig,
    seed: int,
    clock: Clock,
    facts: DataFacts,
    build_objective: Callable[[ObjectiveConfig], Objective],
    *,
    is_branch: bool = False,
) -> DataPath:
    """Open the training text of a run.

    Args:
        data, seed: of the run.
        clock: its phases.
        facts: of its data.
        build_objective: builds the objective of a section of the configuration.
        is_branch: True if the run may continue from another run's position in the data.

    Raises:
        DataError: a folder cannot be read, or was made with another tokenizer.
        ConfigError: the cache cannot hold the remote streams' current blocks.
        StorageError: a remote folder cannot be read.
    """
    from modernbert_train.data.microbatches import MicrobatchMaker
    from modernbert_train.data.open_shards import cache_holds_next_block, open_streams, shuffle_chunks

    streams = open_streams(data, seed, facts)
    next_block = cache_holds_next_block(streams.shards.values(), data)
    shuffle = partial(shuffle_chunks, next_block=next_block)
    planned = plan_path(data, seed, clock, streams.shards, shuffle, is_branch=is_branch)
    return DataPath(data, streams, planned, MicrobatchMaker(streams, build_objective, facts.vocabulary))
