"""Document lengths, packing and mixture, as small tables of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import RunConfig
from modernbert_train.core.text import table
from modernbert_train.data.mixing import phase_weights
from modernbert_train.data.planner import BatchPlan

_BAR = 40  # characters of the longest bar


def length_histogram(lengths: Mapping[str, NDArray[Any]], row_tokens: int, special_tokens: int) -> str:
    """Format a histogram of document lengths by stream, in bins of powers of two, with bars for all streams together.

    Args:
        lengths: tokens of each document, by stream.
        row_tokens: capacity of a row.
    """
    all_lengths = np.concatenate(list(lengths.values())).astype(np.int64)
    max_bits = int(all_lengths.max()).bit_length()
    counts = {name: np.bincount(np.frexp(each)[1], minlength=max_bits + 1) for name, each in lengths.items()}  # by bits
    total = np.sum(list(counts.values()), axis=0)
    rows = [["tokens", *(lengths if len(lengths) > 1 else ["documents"]), ""]]
    for bits in range(int(np.flatnonzero(total)[0]), max_bits + 1):
        low, high = (1 << bits) >> 1, (1 << bits) - 1
        bar = "#" * int(np.ceil(_BAR * total[bits] / total.max()))
        span = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        rows.append([span, *(f"{count[bits]:,}" for count in counts.values()), bar])
    longer = (all_lengths > row_tokens - special_tokens).mean()
    summary = (
        f"{len(all_lengths):,} documents, {all_lengths.sum():,} tokens; median {np.median(all_lengths):,.0f}, longest "
        f"{all_lengths.max():,}; {longer:.1%} are longer than a row of {row_tokens:,} and are cut"
    )
    return "\n".join(["document lengths", table(rows, indent=2, numbers=True), summary])


def packing_lines(plans: Sequence[BatchPlan]) -> str:
    """Format the packing efficiency of some batches."""
    rows = [row for plan in plans for row in plan.rows]
    capacity = sum(plan.num_rows * plan.row_tokens for plan in plans)
    tokens = sum(plan.tokens for plan in plans)
    sequences = sum(len(row) for row in rows)
    return (
        f"packing over {len(rows):,} rows from this batch on\n"
        f"{tokens / capacity:.2%} full: {tokens:,} of {capacity:,} tokens; {sequences / len(rows):.1f} sequences a row"
    )


def mixture_table(config: RunConfig, plans: Sequence[BatchPlan], sizes: Mapping[str, tuple[int, int]]) -> str:
    """Format each stream's requested share in the phase, and its share of some batches.

    Args:
        config: the run.
        plans: batches of one phase.
        sizes: tokens and documents of each stream.
    """
    by_documents = config.data.mix_by == "documents"
    own = {name: size[by_documents] for name, size in sizes.items()}
    weights = phase_weights(config.data, config.phases[plans[0].phase], own)
    planned = {name: weight / sum(weights.values()) for name, weight in weights.items()}
    tokens, starts = Counter[str](), Counter[str]()
    for count in (count for plan in plans for count in plan.streams):
        tokens[count.name] += count.tokens
        starts[count.name] += count.documents
    rows = [["stream", f"asked of {config.data.mix_by}", "tokens", "documents"]]
    for name in sizes:
        rows.append([name, f"{planned[name]:.2%}", *(_share(counted, name) for counted in (tokens, starts))])
    return "\n".join(
        ["mixture over the same rows; documents count where they begin", table(rows, indent=2, numbers=True)]
    )


def _share(counted: Counter[str], name: str) -> str:
    return f"{counted[name] / counted.total():.2%}" if counted.total() else "-"
