"""Keys of a run that follow from a recipe of texts, epochs and a rate, for `finetune` and `retrieval train`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.packing import WINDOW

_MICROBATCH_TOKENS = 16_384


def folder_of(overrides: Sequence[str]) -> Path:
    """Return the folder of the run that `overrides` name."""
    last = {key: value for key, _, value in (each.partition("=") for each in overrides)}
    return Path(last.get("runs_folder", RunConfig.__dataclass_fields__["runs_folder"].default)) / last["name"]  # type: ignore[arg-type]


def first_weights(config: RunConfig) -> str:
    """Return the source of the run's initial weights, from its record; newer checkpoints may exist by now."""
    entries = RunFolder(config).read_metrics()
    return next((str(entry.get("from", "")) for entry in entries if entry.get("kind") == "start"), "")


def phase(
    *,
    tokens: int,
    batch_tokens: float,
    longest: int,
    positions: int | None,
    warmup: float,
    microbatch_tokens: float = _MICROBATCH_TOKENS,
) -> dict[str, Any]:
    """Return the only phase of a recipe's run, with a linear decay to zero.

    Args:
        tokens: length of the training.
        batch_tokens: mean size of a batch.
        longest: tokens of the longest document, special ones included.
        positions: longest sequence that the architecture reads; None: any.
        warmup: share of the training.
        microbatch_tokens: size of a microbatch, rounded down to whole rows; at least a row.
    """
    row_tokens, batch_rows = _rows(batch_tokens, max(longest, 16), positions)
    rows = max(1, min(batch_rows, int(microbatch_tokens / row_tokens)))
    rising = math.ceil(warmup * tokens)
    return {
        "tokens": tokens,
        "row_tokens": row_tokens,
        "batch_rows": batch_rows,
        "microbatch_tokens": rows * row_tokens,
        "schedule": {"warmup_tokens": rising, "decay_tokens": tokens - rising, "decay": "linear"},
    }


def _rows(batch: float, least: int, positions: int | None) -> tuple[int, int]:
    """Return row length and rows of a batch of about `batch` tokens.

    The number of rows divides among 8 ranks, or 2. A row fits the longest text, and is longer if fewer rows are used.
    """
    rows = max(1, int(batch / least))
    rows -= rows % (8 if rows >= 8 else 2 if rows >= 2 else 1)
    length = max(-(-least // 8), round(batch / rows / 8)) * 8
    return min(length, max(least, positions or length)), rows


def packing_window(texts: int) -> int:
    """Return data.packing_window for a small dataset: few texts wait for the next epoch."""
    return max(4, min(WINDOW, texts // 32))


def adamw(lr: float, weight_decay: float, max_grad_norm: float | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the section `optim`; `weight_decay` is torch's, which is multiplied by the rate."""
    found = {"name": "adamw", "lr": lr, "weight_decay": weight_decay}
    other = [each for each in overrides if each.startswith("optim.name=") and each != "optim.name=adamw"]
    return found if other else found | {"max_grad_norm": max_grad_norm}  # others bound their updates themselves
