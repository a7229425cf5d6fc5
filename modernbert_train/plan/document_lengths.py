"""Lengths of a run's sequences: read from the data if it exists, otherwise assumed, and marked as such.

The cost of attention depends on sequence lengths, and the padding of rows on how well they pack; both follow from
document lengths. In a mixture each stream is weighted by its share of the phase's text. Data in a store is not fetched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.clock import Position
from modernbert_train.config.schema import DataConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.data.dataset_card import LENGTHS, DatasetCard
from modernbert_train.data.facts import DataFacts, missing_stream
from modernbert_train.data.mixing import phase_weights
from modernbert_train.data.packing import GreedyPacker
from modernbert_train.data.shard_index import read_index
from modernbert_train.errors import DataError
from modernbert_train.plan.attended_keys import Tiles, mean_tiles, mixed
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import Spans, mean_spans
from modernbert_train.plan.teacher_cost import teacher_of

SPREAD = 0.8  # standard deviation of the logarithm of assumed lengths
_ASSUMED = 4096  # number of assumed documents
_SAMPLE, _RUN = 1 << 20, 1 << 12  # documents sampled from a large stream, and the length of each contiguous run
_PACKED = 10_000  # chunks packed to measure the padding of rows


@dataclass(frozen=True)
class StreamLengths:
    """Documents of one stream.

    Attributes:
        lengths: tokens of each document without special tokens, or of an even sample of the documents.
        documents: number of documents.
        shard_documents: int64 [shards], documents in each shard.
        texts: for pairs of texts, the tokens of single texts with special tokens; None if not pairs, or not known.
    """

    lengths: NDArray[np.integer]
    documents: int
    shard_documents: NDArray[np.int64]
    texts: NDArray[np.int64] | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.lengths) == self.documents

    @property
    def tokens(self) -> int:
        return round(int(self.lengths.sum(dtype=np.int64)) * self.documents / len(self.lengths))


@dataclass(frozen=True)
class Documents:
    """Lengths of documents.

    Attributes:
        source: their origin, for display.
        streams: lengths by stream; empty if the data does not exist here.
        assumed: lengths used instead of data; None without data means rows of one sequence each.
    """

    source: str
    streams: Mapping[str, StreamLengths] = field(default_factory=dict)
    assumed: NDArray[np.integer] | None = None


@dataclass(frozen=True)
class RowText:
    """Contents of the rows of a phase.

    Attributes:
        spans: keys that a token sees, on average.
        tiles: keys that kernels compute for it.
        fill: share of a row's tokens that are not padding.
        sequence_tokens: mean length of a sequence, with special tokens.
        passes: passes of a phase over each stream, by name; empty if the data does not exist here.
        teacher_spans: as `spans`, in the layers of a teacher; None without one.
    """

    spans: Spans
    tiles: Tiles
    fill: float
    sequence_tokens: float
    passes: Mapping[str, float]
    teacher_spans: Spans | None = None


def read_documents(data: DataConfig, median: int | None, facts: DataFacts | None) -> Documents:
    """Read or assume the lengths of the run's documents.

    Args:
        data: the run's section `data`; the data need not exist.
        median: assumed median length in tokens, instead of the data; the logarithms of the lengths are then normal
            with a standard deviation of 0.8. None reads the data; without data every row is one sequence.
        facts: checked facts of the data; None if it is not here.

    Raises:
        DataError: the data is damaged.
    """
    if median is not None:
        normal = NormalDist(math.log(median), SPREAD)
        drawn = np.exp([normal.inv_cdf((i + 0.5) / _ASSUMED) for i in range(_ASSUMED)])
        text = f"assumed, a median of {median:,} tokens and a log-normal spread of {SPREAD}"
        return Documents(text, assumed=np.maximum(1, np.round(drawn)).astype(np.int64))
    if facts is None:
        missing = missing_stream(data)
        return Documents(f"assumed, since {missing} is not here: every row one sequence, which costs most")
    streams = {name: _read(folder.local, folder.card) for name, folder in facts.streams.items()}
    descriptions = (
        f"{facts.streams[name].path} with {stream.documents:,} documents of median "
        f"{np.median(stream.lengths):,.0f} tokens"
        for name, stream in streams.items()
    )
    return Documents(", ".join(descriptions), streams)


def _read(folder: Path, card: DatasetCard) -> StreamLengths:
    with os_errors_as(
        DataError, f"{folder}: {LENGTHS} cannot be read", "Prepare the data again.", ValueError, EOFError
    ):
        lengths = np.load(folder / LENGTHS, mmap_mode="r", allow_pickle=False)
    shard_documents = read_index(folder / card.index_file, card.column, nested=card.is_adopted).documents
    texts = None if card.text_lengths is None else np.array(card.text_lengths, dtype=np.int64)
    return StreamLengths(_sample(lengths), len(lengths), shard_documents, texts)


def _sample(lengths: NDArray[Any]) -> NDArray[Any]:
    """Return all lengths, or evenly spaced runs of a large file: reading is by pages of about a thousand lengths."""
    if len(lengths) <= _SAMPLE:
        return np.asarray(lengths)
    firsts = np.linspace(0, len(lengths) - _RUN, _SAMPLE // _RUN, dtype=np.int64)
    return np.concatenate([lengths[first : first + _RUN] for first in firsts.tolist()])


def rows_of(data: DataConfig, now: Position, documents: Documents) -> RowText:
    """Cut documents into sequences as training does, and pack a sample of them.

    Args:
        data: the run's section `data`.
        now: the phase; its row length and shares of streams are used.
        documents: documents of the run.
    """
    phase, objective, model = now.phase, now.objective, census(now.model)
    row, special = phase.row_tokens, objective.special_tokens
    if documents.streams:
        own = {
            name: stream.documents if data.mix_by == "documents" else stream.tokens
            for name, stream in documents.streams.items()
        }
        weights = {name: weight for name, weight in phase_weights(data, phase, own).items() if weight}
        cut = {name: _sequences(documents.streams[name].lengths, row, special) for name in weights}
    else:
        weights = {"": 1}
        whole = np.array([row], dtype=np.int64)
        cut = {"": whole if documents.assumed is None else _sequences(documents.assumed, row, special)}
    # the phase's shares weight the tokens of each stream; with mix_by=documents, its mean document length too
    by_documents = bool(documents.streams) and data.mix_by == "documents"
    amounts = {
        name: weight * (documents.streams[name].tokens / documents.streams[name].documents if by_documents else 1.0)
        for name, weight in weights.items()
    }
    shares = {name: weight / sum(amounts.values()) for name, weight in amounts.items()}
    apart = dict(cut)  # lengths of sequences that do not attend to each other
    for name, texts in ((name, stream.texts) for name, stream in documents.streams.items()):
        if objective.compares and name in cut and texts is not None:
            apart[name] = texts
    spans = {name: mean_spans(each, model, objective.order, objective.query_share) for name, each in apart.items()}
    teacher = teacher_of(objective)
    taught = {} if teacher is None else {name: mean_spans(each, census(teacher)) for name, each in apart.items()}
    tiles = {name: mean_tiles(each, model, objective.order, objective.query_share) for name, each in apart.items()}
    sequences = {name: share / float(cut[name].mean()) for name, share in shares.items()}  # per token
    passes = {
        name: phase.tokens * share * len(stream.lengths) / stream.documents / int(cut[name].sum())
        for name, share in shares.items()
        if (stream := documents.streams.get(name)) is not None
    }
    return RowText(
        _mean(spans, shares),
        mixed(tiles, shares),
        _fill(data, cut, sequences, row, special) if documents.streams or documents.assumed is not None else 1.0,
        1 / sum(share / float(apart[name].mean()) for name, share in shares.items()),
        passes,
        _mean(taught, shares) if taught else None,
    )


def _mean(spans: Mapping[str, Spans], shares: Mapping[str, float]) -> Spans:
    return Spans(
        whole=sum(share * spans[name].whole for name, share in shares.items()),
        local=sum(share * spans[name].local for name, share in shares.items()),
    )


def _sequences(lengths: NDArray[np.integer], row_tokens: int, special: int) -> NDArray[np.int64]:
    """Return the lengths of the sequences that documents are cut into, with special tokens."""
    num_full, remainders = np.divmod(lengths.astype(np.int64), row_tokens - special)
    full: NDArray[np.int64] = np.full(int(num_full.sum()), row_tokens, dtype=np.int64)
    return np.concatenate([full, remainders[remainders > 0] + special])


def _fill(
    data: DataConfig,
    cut: Mapping[str, NDArray[np.int64]],
    sequences: Mapping[str, float],
    row_tokens: int,
    special: int,
) -> float:
    """Return the fill of packed rows, from a sample in random order; unfinished rows count only if none is finished."""
    rng = np.random.default_rng(0)
    total = sum(sequences.values())
    drawn = np.concatenate(
        [rng.choice(lengths, math.ceil(_PACKED * sequences[name] / total)) for name, lengths in cut.items()]
    )
    lengths = rng.permutation(drawn)
    lengths = lengths[lengths > special] - special
    packer = GreedyPacker(row_tokens, data.packing_window, data.max_wait_rows, special)
    chunks_C3 = np.stack([np.arange(len(lengths)), np.zeros_like(lengths), lengths], axis=1)
    packer.place_many(chunks_C3, 0, 0, num_rows=len(chunks_C3) + 1)
    if not packer.num_ready:
        packer.flush()
    chunks_C4 = packer.ready.chunks_C4
    return (int(chunks_C4[:, 3].sum()) + special * len(chunks_C4)) / (packer.num_ready * row_tokens)
