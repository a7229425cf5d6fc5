"""Format statistics of a dataset, for `inspect` of a folder of data; only small files are read, no shards.

Documents and tokens of each split and source, documents left out and duplicates among them, and document lengths. For
several folders, such as one per language, also the bytes of text per token: few bytes mean that the tokenizer covers
that language badly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import as_type, read_json
from modernbert_train.core.text import table
from modernbert_train.data.arrays import load_lengths
from modernbert_train.data.dataset_card import CARD, LENGTHS, PREPARE_REPORT, read_card
from modernbert_train.data.field_counts import FieldCounts
from modernbert_train.data.statistics import length_bins, source_counts
from modernbert_train.errors import DataError

_PERCENTILES = (5, 25, 50, 75, 95)
_BAR = 40  # characters of the longest bar
_VALUES = 20  # maximum values shown of a field


def describe_datasets(folders: Sequence[Path], *, as_json: bool) -> str:
    """Return a table for each dataset, or all as JSON.

    Raises:
        DataError: a folder is not a dataset, or damaged.
    """
    facts = {str(folder): dataset_stats(folder) for folder in folders}
    if as_json:
        return json.dumps(facts, indent=2)
    tables = [_table(name, each) for name, each in facts.items()]
    return "\n\n".join([*tables, *([_bytes_per_token(facts)] if len(facts) > 1 else [])])


def dataset_stats(folder: Path) -> dict[str, Any]:
    """Return statistics of a dataset, or of one split.

    Returns:
        `splits`: for each, documents, tokens, shares of the length percentiles and a histogram, whose bins are
        [from, to) in tokens with the documents and tokens in them, and those by the value of each field. `sources`: for
        each, as prepare_report.json has it; empty for a single split.

    Raises:
        DataError: the folder is not a dataset, or damaged.
    """
    report = folder / PREPARE_REPORT
    splits = [folder] if (folder / CARD).exists() else sorted(path.parent for path in folder.glob(f"*/{CARD}"))
    if not splits:
        raise DataError(
            f"{folder}: neither a run nor a dataset written by `prepare` (or a split of one). Correct the path."
        )
    remedy = "Prepare the data again with --overwrite."
    with os_errors_as(DataError, f"{report}: cannot be read", remedy, ValueError, KeyError, TypeError):
        sources = read_json(report)["sources"] if report.exists() else {}
    return {"splits": {split.name: _split_stats(split) for split in splits}, "sources": sources}


def _split_stats(folder: Path) -> dict[str, Any]:
    card = read_card(folder)
    lengths = load_lengths(folder / LENGTHS, "Restore it from a copy.")
    if not len(lengths):
        raise DataError(f"{folder / LENGTHS}: holds no lengths. Restore it from a copy.")
    return {
        "documents": card.documents,
        "tokens": card.tokens,
        "text_bytes": card.text_bytes,
        "longest": int(lengths.max()),
        "percentiles": {str(p): int(np.percentile(lengths, p)) for p in _PERCENTILES},
        "histogram": length_bins(lengths),
        "fields": {name: asdict(counts) for name, counts in (card.fields or {}).items()},
    }


def _table(name: str, facts: dict[str, Any]) -> str:
    return "\n".join([name, *_source_lines(facts["sources"]), *_split_lines(facts["splits"])])


def _bytes_per_token(facts: dict[str, dict[str, Any]]) -> str:
    """Format bytes of text per token of each split, absolute and relative to the first split that counts them."""
    rows, first = [["folder", "split", "tokens", "bytes a token", "beside the first"]], None
    for name, each in facts.items():
        for split, counts in each["splits"].items():
            ratio = counts["text_bytes"] / counts["tokens"] if counts["text_bytes"] else None
            first = first or ratio
            words = ("not counted", "") if ratio is None else (f"{ratio:.2f}", f"{ratio / (first or ratio):.2f}")
            rows.append([name, split, f"{counts['tokens']:,}", *words])
    return table(rows, numbers=True)


def _source_lines(sources: dict[str, Any]) -> Iterator[str]:
    if not sources:
        return
    rows = [["source", "read", "documents", "tokens", "duplicates", "near", "other left out", "altered"]]
    for name, each in sources.items():
        counts = [*asdict(source_counts(each)).values(), sum(each["altered"].values())]
        rows.append([name, *(f"{count:,}" for count in counts)])
    yield table(rows, indent=2, numbers=True)


def _split_lines(splits: dict[str, Any]) -> Iterator[str]:
    for name, each in splits.items():
        percentiles = ", ".join(f"{p} % {value:,}" for p, value in each["percentiles"].items())
        yield f"  {name}: {each['documents']:,} documents, {each['tokens']:,} tokens"
        yield f"    tokens in a document: {percentiles}, longest {each['longest']:,}"
        max_documents = max(bin["documents"] for bin in each["histogram"])
        for bin in each["histogram"]:
            bar = "#" * -(-bin["documents"] * _BAR // max_documents)
            line = f"    from {bin['from']:>6,}  {bin['documents']:>12,} documents"
            yield f"{line}  {bin['tokens'] / each['tokens']:>6.1%} of the tokens  {bar}".rstrip()
        for field, content in each["fields"].items():
            for value, amount in as_type(FieldCounts, content).most(_VALUES).rows():
                share = f"{amount.tokens / each['tokens']:>6.1%} of the tokens"
                yield f"    {field}: {value}  {amount.documents:,} documents  {share}"
