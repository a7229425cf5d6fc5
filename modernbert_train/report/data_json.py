"""Read data.json of a run and draw its data: lengths, fields, and which documents of each source were kept."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import as_type, read_json
from modernbert_train.core.text import percent, plural, shorten, tokens_text, whole
from modernbert_train.data.statistics import DATA, FolderStatistics, RunStatistics, SourceCounts

_STREAMS = 50  # maximum number drawn: the first ones
_FIELDS, _VALUES, _BINS = 10, 15, 20  # maximum numbers drawn of a stream
_SOURCES = 100  # maximum number drawn: the first ones
_LETTERS = 80  # maximum characters of a name


def read_data(run_folder: Path) -> RunStatistics | None:
    """Return the record; None if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        statistics: RunStatistics = as_type(RunStatistics, read_json(run_folder / DATA))
        return statistics
    return None


def titled_folders(data: RunStatistics | None) -> list[tuple[str, FolderStatistics]]:
    """Return the folders of each stream and of the held-out text, with a title."""
    if data is None:
        return []
    streams = [(f"Stream {name}", folder) for name, folder in list(data.streams.items())[:_STREAMS]]
    return streams if data.validation is None else [*streams, ("Held out", data.validation)]


def pictures(data: RunStatistics | None) -> list[dict[str, Any]]:
    """Return, for each folder, its title, a line, bars of the lengths, shares of each field, and sources.

    A bar is [from, share of the documents, share of the tokens, text], a share [value, share, text], and a source
    [name, shares kept and left out, text].
    """
    drawings, drawn = [], set()
    for title, folder in titled_folders(data):
        sources = tuple(folder.sources.items())
        drawings.append(_picture(title, folder, [] if sources in drawn else list(sources[:_SOURCES])))
        drawn.add(sources)  # the sources of a dataset once, however many of its folders are streams
    return drawings


def _picture(title: str, folder: FolderStatistics, sources: list[tuple[str, SourceCounts]]) -> dict[str, Any]:
    return {
        "title": shorten(title, _LETTERS),
        "note": f"{plural(folder.documents, 'document')} with {tokens_text(folder.tokens)} tokens",
        "bars": _bars(folder),
        "fields": [[shorten(name, _LETTERS), _shares(folder, name)] for name in list(folder.fields)[:_FIELDS]],
        "sources": [[shorten(name, _LETTERS), *_kept(counts)] for name, counts in sources],
    }


def _bars(folder: FolderStatistics) -> list[list[Any]]:
    bins = folder.lengths or []
    some = [number for number, each in enumerate(bins) if each["documents"]]
    bins = bins[some[0] : some[-1] + 1] if some else []  # without the empty ones at both ends
    documents, tokens = (sum(each[key] for each in bins) or 1 for key in ("documents", "tokens"))
    return [
        [
            each["from"],
            round(each["documents"] / documents, 5),
            round(each["tokens"] / tokens, 5),
            f"{each['from']:,} to {each['to'] - 1:,} tokens: {plural(each['documents'], 'document')} "
            f"({percent(1)(each['documents'] / documents)}), {percent(1)(each['tokens'] / tokens)} of the tokens",
        ]
        for each in bins[:_BINS]
    ]


def _shares(folder: FolderStatistics, name: str) -> list[list[Any]]:
    rows = folder.fields[name].rows()[:_VALUES]
    total = folder.tokens or 1
    return [
        [
            shorten(value, _LETTERS),
            round(min(amount.tokens / total, 1.0), 5),
            f"{percent(1)(amount.tokens / total)} of the tokens, {plural(amount.documents, 'document')}",
        ]
        for value, amount in rows
    ]


def _kept(counts: SourceCounts) -> tuple[list[float], str]:
    number_of = {
        "kept": counts.documents,
        "duplicates": counts.duplicates,
        "near duplicates": counts.near_duplicates,
        "left out otherwise": counts.left_out,
    }
    total = sum(number_of.values()) or 1
    words = ", ".join(f"{name} {percent(1)(number / total)}" for name, number in number_of.items() if number)
    return [round(number / total, 5) for number in number_of.values()], f"{whole(counts.read)} read: {words}"
