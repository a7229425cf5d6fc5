"""Statistics of a run's data: lengths of documents, licences and other fields, documents dropped by source.

A start records them in the run's folder, because a report is drawn from that folder alone. No shard is read here; the
lengths of a large dataset were counted when it was prepared.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.read_json import Count, as_type, read_json
from modernbert_train.data.arrays import load_lengths
from modernbert_train.data.dataset_card import LENGTHS, DatasetCard, prepare_report
from modernbert_train.data.facts import DataFacts, FolderFacts
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.errors import DataError

DATA = "data.json"  # in a run's folder
_EDGES = [1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]  # tokens; the last bin is open
_COUNTED_AT_ONCE = 1 << 22  # documents
_COUNTED_HERE = 10_000_000  # documents: counting the lengths of more takes longer than a second
_VALUES = 12  # listed for a field
_STREAMS = 50  # recorded for a run: the first ones

Bin = TypedDict("Bin", {"from": Count, "to": Count, "documents": Count, "tokens": Count})  # [from, to) in tokens


@dataclass(frozen=True)
class SourceCounts:
    """Documents of one source; `read` is the sum of all others except the tokens.

    Attributes:
        read, documents: as read, and as written into any split.
        tokens: written.
        duplicates, near_duplicates, left_out: dropped, the last for any other reason.
    """

    read: Count
    documents: Count
    tokens: Count
    duplicates: Count
    near_duplicates: Count
    left_out: Count


@dataclass(frozen=True)
class FolderStatistics:
    """One folder of shards.

    Attributes:
        documents, tokens: in it.
        lengths: histogram of documents by length; None if they were not counted.
        fields: documents by the values of their fields, the commonest values of each.
        sources: of the whole dataset, if `prepare` made it and its report is available.
        prompts: see `DatasetCard`.
    """

    documents: Count
    tokens: Count
    lengths: list[Bin] | None
    fields: dict[str, FieldCounts]
    sources: dict[str, SourceCounts]
    prompts: dict[str, str] | None = None


@dataclass(frozen=True)
class RunStatistics:
    """The data of a run: its streams by name, and the held-out text."""

    streams: dict[str, FolderStatistics]
    validation: FolderStatistics | None


def length_bins(lengths: NDArray[Any]) -> list[Bin]:
    """Count documents and tokens by document length, in bins of powers of two; constant memory."""
    documents, tokens, longest = np.zeros(len(_EDGES), np.int64), np.zeros(len(_EDGES), np.int64), 0
    for begin in range(0, len(lengths), _COUNTED_AT_ONCE):
        part = np.asarray(lengths[begin : begin + _COUNTED_AT_ONCE])
        bins = np.searchsorted(_EDGES[1:], part, side="right")
        documents += np.bincount(bins, minlength=len(_EDGES))
        tokens += np.bincount(bins, part, minlength=len(_EDGES)).astype(np.int64)
        longest = max(longest, int(part.max()))
    ends = [*_EDGES[1:], max(_EDGES[-1], longest) + 1]
    return [
        {"from": first, "to": end, "documents": int(count), "tokens": int(amount)}
        for first, end, count, amount in zip(_EDGES, ends, documents, tokens, strict=True)
    ]


def source_counts(source: dict[str, Any]) -> SourceCounts:
    """Parse one source of prepare_report.json. Raises KeyError, TypeError or ValueError if it is malformed."""
    written, dropped = source["written"].values(), dict(source["dropped"])
    documents, tokens = (sum(split[key] for split in written) for key in ("documents", "tokens"))
    duplicates, near = dropped.pop("duplicate", 0), dropped.pop("near_duplicate", 0)
    counts = (source["documents_read"], documents, tokens, duplicates, near, sum(dropped.values()))
    return SourceCounts(*(as_type(Count, each) for each in counts))


def run_statistics(facts: DataFacts) -> RunStatistics:
    """Return the statistics of a run's data; unreadable parts are skipped, because nothing depends on them."""
    streams = {name: _folder_statistics(folder) for name, folder in list(facts.streams.items())[:_STREAMS]}
    return RunStatistics(streams, None if facts.validation is None else _folder_statistics(facts.validation))


def _folder_statistics(folder: FolderFacts) -> FolderStatistics:
    card = folder.card
    lengths, sources = _prepared(folder.local, card)
    if lengths is None and card.documents <= _COUNTED_HERE:
        with suppress(DataError):  # training on them will report the error
            lengths = length_bins(load_lengths(folder.local / LENGTHS, ""))
    fields = {name: counts.most(_VALUES) for name, counts in (card.fields or {}).items()}
    return FolderStatistics(card.documents, card.tokens, lengths, fields, sources, card.prompts)


def prompts_of(run: Path) -> dict[str, str] | None:
    """Return the prompts of a run's queries and documents; None without any, or if streams differ."""
    statistics: RunStatistics | None = None
    with suppress(OSError, ValueError):  # of an earlier version, or damaged
        statistics = as_type(RunStatistics, read_json(run / DATA))
    prompts = [] if statistics is None else [stream.prompts for stream in statistics.streams.values() if stream.prompts]
    return prompts[0] if prompts and all(each == prompts[0] for each in prompts) else None


def _prepared(folder: Path, card: DatasetCard) -> tuple[list[Bin] | None, dict[str, SourceCounts]]:
    """Return what `prepare` has recorded about these shards: histogram of lengths, and sources."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        report = prepare_report(folder, card)
        lengths = as_type(list[Bin] | None, report.get("lengths", {}).get(folder.name))
        return lengths, {name: source_counts(source) for name, source in report["sources"].items()}
    return None, {}
