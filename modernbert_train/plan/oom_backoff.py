"""After running out of memory, halve an automatically chosen microbatch on all ranks, permanently.

The rank that runs out of memory notes the half in the run's folder and raises `OomBackoff`. The others may be waiting
for it in a collective, and end with it (distributed/fail_together.py). Then all start again: a single rank by itself,
several by the launcher. Dropout is keyed by the index of a microbatch, so the half is taken only before a checkpoint
contains a step of the phase: nothing that was trained with the larger microbatch is kept.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from modernbert_train.checkpoints.manifest import STATE, newest_step
from modernbert_train.config.auto import microbatch_key
from modernbert_train.config.schema import PhaseConfig
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.read_json import is_count, read_json
from modernbert_train.errors import ConfigError, OomBackoff, StorageError

BACKOFF_FILE = "halved.json"
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in errors of torch, Triton and NVIDIA's libraries


def read_backoff(folder: Path) -> dict[str, int]:
    """Read which microbatches were halved in a run's folder: tokens by dotted key; a damaged note counts as none."""
    noted = None
    with suppress(OSError, ValueError):
        noted = read_json(folder / BACKOFF_FILE)
    limits = noted if isinstance(noted, dict) else {}
    return {key: tokens for key, tokens in limits.items() if is_count(tokens) and tokens > 0}


def phase_of_newest(folder: Path) -> str | None:
    """Return the phase of the newest checkpoint's last step; None without a checkpoint."""
    newest = newest_step(folder)
    if newest is not None and newest.name != "step-00000000":
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged; resuming reports it
            return str(read_json(newest / STATE)["phase"])
    return None


def is_full(error: BaseException) -> bool:
    """True if a GPU ran out of memory; not every library raises a type for it."""
    return any(word.lower() in str(error).lower() for word in _FULL)


def halve(folder: Path, phase: str, configured: PhaseConfig, now: PhaseConfig) -> OomBackoff | ConfigError | None:
    """Record half of a phase's microbatch, and return the error to raise; None if it must not change.

    Args:
        folder: of the run.
        phase: name of the phase that ran out of memory.
        configured: the phase as the user configured it.
        now: the phase with all open keys filled.
    """
    key = microbatch_key(phase)
    if configured.microbatch_tokens is not None or phase_of_newest(folder) == phase:
        return None
    if now.microbatch_rows == 1:
        return ConfigError(
            f"{key}={now.tokens_at_once}: not even one row fits the memory of this GPU. Set "
            f"compute.activation_checkpointing=true, lower phases.{phase}.row_tokens, or take a larger GPU."
        )
    half = now.microbatch_rows // 2 * now.row_tokens
    file = folder / BACKOFF_FILE
    remedy = f"Set {key}={half}, which does not fit as it was."
    with os_errors_as(StorageError, f"{file}: cannot be written", remedy, ValueError):
        noted = read_json(file) if file.exists() else {}
        write_whole(file, json.dumps({**noted, key: half}) + "\n")
    return OomBackoff(
        f"{key}={now.tokens_at_once} does not fit the memory of this GPU: all ranks start again with {half}"
    )
