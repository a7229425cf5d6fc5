"""Rows in a global batch, as a pure function of the tokens seen in the phase."""

from __future__ import annotations

from modernbert_train.config.schema import PhaseConfig


def batch_rows_at(phase: PhaseConfig, tokens: int) -> int:
    """Return the size of the global batch that starts at a position.

    During the warmup, every size from start_rows to the last below batch_rows is used for the same number of steps, so
    a size's share of the warmup tokens is proportional to it (facts of the released recipe: 768, 1536, ... to 4608).

    Args:
        phase: the phase.
        tokens: global tokens seen since the phase's start.

    Returns:
        Rows over all ranks.
    """
    if phase.batch_warmup is None or tokens >= phase.batch_warmup.tokens:
        return phase.batch_rows
    sizes = phase.batch_sizes[:-1]
    share = tokens * sum(sizes)
    for rows in sizes:
        share -= rows * phase.batch_warmup.tokens
        if share < 0:
            return rows
    return phase.batch_rows
