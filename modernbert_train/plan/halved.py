"""A microbatch that nobody gave and that does not fit all the same: half of it is taken, by all ranks and for good.

The rank that runs out of memory notes the half in the run's folder and ends with `Halved`; the others, which may wait
for it within a collective, end with it (distributed/fail_together.py), and all start again: by themselves where a rank
is alone, else by the launcher. Dropout is keyed by the number of a microbatch, so this is only done while no checkpoint
has seen a step of the phase: then nothing that was trained with the larger one is kept.
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
from modernbert_train.errors import ConfigError, Halved, StorageError

HALVED = "halved.json"
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in what torch, Triton and NVIDIA's libraries raise


def halved(folder: Path) -> dict[str, int]:
    """The microbatches that were halved for the run of a folder, in tokens, by their keys."""
    noted = None
    with suppress(OSError, ValueError):
        noted = read_json(folder / HALVED)
    found = noted if isinstance(noted, dict) else {}
    return {key: tokens for key, tokens in found.items() if is_count(tokens) and tokens > 0}


def phase_of_newest(folder: Path) -> str | None:
    """The phase of the last step that a checkpoint has seen; None where there is none."""
    newest = newest_step(folder)
    if newest is not None and newest.name != "step-00000000":
        with suppress(OSError, ValueError, KeyError, TypeError):  # damaged, and whoever resumes will say so
            return str(read_json(newest / STATE)["phase"])
    return None


def is_full(error: BaseException) -> bool:
    """Whether a GPU had no more memory; not all that say so have a type of their own."""
    return any(word.lower() in str(error).lower() for word in _FULL)


def halve(folder: Path, phase: str, given: PhaseConfig, now: PhaseConfig) -> Halved | ConfigError | None:
    """Note half of a phase's microbatch; the error to end with, None where it is not for us to change.

    Args:
        folder: of the run.
        phase: that ran out of memory.
        given: as its user gives it.
        now: the same with nothing open.
    """
    key = microbatch_key(phase)
    if given.microbatch_tokens is not None or phase_of_newest(folder) == phase:
        return None
    if now.microbatch_rows == 1:
        return ConfigError(
            f"{key}={now.tokens_at_once}: not even one row fits the memory of this GPU. Set "
            f"compute.activation_checkpointing=true, lower phases.{phase}.row_tokens, or take a larger GPU."
        )
    half = now.microbatch_rows // 2 * now.row_tokens
    file = folder / HALVED
    remedy = f"Set {key}={half}, which does not fit as it was."
    with os_errors_as(StorageError, f"{file}: cannot be written", remedy, ValueError):
        noted = read_json(file) if file.exists() else {}
        write_whole(file, json.dumps({**noted, key: half}) + "\n")
    return Halved(f"{key}={now.tokens_at_once} does not fit the memory of this GPU: all ranks start again with {half}")
