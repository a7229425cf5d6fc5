"""Open folders of shards, local or remote; no other file distinguishes them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from modernbert_train.config.schema import DataConfig
from modernbert_train.data.check_shards import require_tokenizer
from modernbert_train.data.facts import DataFacts, FolderFacts
from modernbert_train.data.mds import TokenShards
from modernbert_train.data.mixture import Stream, TokenStreams, named_stream, stream_seed
from modernbert_train.data.prefetch import PrefetchedChunks
from modernbert_train.data.remote import remote_folder
from modernbert_train.data.shuffle import ShuffledChunks
from modernbert_train.errors import ConfigError
from modernbert_train.vocabulary import Vocabulary


def open_shards(folder: FolderFacts, data: DataConfig, vocabulary: Vocabulary) -> TokenShards:
    """Open the shards of a folder and verify their tokenizer; remote shards are fetched on reading.

    Args:
        folder: its facts.
        data: limits of memory and cache.
        vocabulary: of the run's tokenizer.

    Raises:
        DataError: the folder cannot be read, is empty, or was made with another tokenizer.
        ConfigError, StorageError: a remote folder cannot be read.
    """
    require_tokenizer(folder, data.tokenizer, vocabulary)
    return TokenShards(
        folder.local,
        folder.card.column,
        vocabulary.num_entries,
        max_open_shards=2 * data.shuffle_block_shards,  # one block is finished while the next begins
        remote=remote_folder(folder.shards, data),
        card=folder.card,
    )


def open_streams(data: DataConfig, seed: int, facts: DataFacts) -> TokenStreams:
    """Open the training documents of a run.

    Raises:
        RunError: as open_shards, with the stream's name.
    """
    streams = []
    for name, folder in facts.streams.items():
        with named_stream(name):
            shards = open_shards(folder, data, facts.vocabulary)
            streams.append(Stream(name, stream_seed(data, seed, name), shards))
    return TokenStreams(streams)


def cache_holds_next_block(folders: Iterable[TokenShards], data: DataConfig) -> bool:
    """Return True if the cache can hold the next block of each remote training folder as well as the current one.

    Raises:
        ConfigError: not even the current block fits: its shards would be fetched repeatedly. Names both sizes.
    """
    blocks = {
        shards.remote.url: int(np.sort(shards.shard_bytes)[-data.shuffle_block_shards :].sum())
        for shards in folders
        if shards.remote is not None
    }
    needed, limit = sum(blocks.values()), data.cache_limit_bytes
    if limit is not None and limit < needed:
        raise ConfigError(
            f"data.cache_limit_bytes={limit}: one block (data.shuffle_block_shards={data.shuffle_block_shards}) of "
            f"{', '.join(blocks)} takes up to {needed} bytes, and its shards would be fetched again and again. Set "
            f"data.cache_limit_bytes to at least {needed}, better {2 * needed}, or lower data.shuffle_block_shards."
        )
    return limit is None or limit >= 2 * needed


def shuffle_chunks(shards: TokenShards, block_shards: int, seed: int, *, next_block: bool) -> ShuffledChunks:
    """Return the chunks of a training folder in their order; remote shards are fetched ahead.

    Args:
        shards: of the folder.
        block_shards: shards shuffled together.
        seed: keys the order.
        next_block: fetch the next block too, if `cache_holds_next_block`.
    """
    if shards.remote is None:
        return ShuffledChunks(shards.shard_documents, shards.lengths, block_shards, seed, shards.tokens)
    return PrefetchedChunks(shards, block_shards, seed, next_block=next_block)
