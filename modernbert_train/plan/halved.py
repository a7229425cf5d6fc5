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
from modernbert_train.config.auto import microbatch_key, open_settings, value_of, with_settings
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.read_json import is_count, read_json
from modernbert_train.errors import ConfigError, Halved, StorageError

HALVED = "halved.json"
_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in what torch, Triton and NVIDIA's libraries raise


def with_halved(config: RunConfig, given: RunConfig) -> RunConfig:
    """The run with the microbatches that were halved for it, where its user gives none.

    Args:
        config: the run, with nothing open.
        given: as its user gives it.
    """
    noted = {}
    with suppress(OSError, ValueError):
        noted = read_json(Path(config.folder) / HALVED)
    keys = [key for key in open_settings(given) if key in noted and is_count(noted[key])]
    return with_settings(config, {key: min(noted[key], value_of(config, key)) for key in keys if noted[key] > 0})


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


def halve(given: RunConfig, config: RunConfig, phase: str) -> Halved | ConfigError | None:
    """Note half of a phase's microbatch; the error to end with, None where it is not for us to change.

    Args:
        given: the run as its user gives it.
        config: the same with nothing open.
        phase: that ran out of memory.
    """
    key, now = microbatch_key(phase), config.phases[phase]
    if key not in open_settings(given) or phase_of_newest(Path(config.folder)) == phase:
        return None
    if now.microbatch_rows == 1:
        return ConfigError(
            f"{key}={now.tokens_at_once}: not even one row fits the memory of this GPU. Set "
            f"compute.activation_checkpointing=true, lower phases.{phase}.row_tokens, or take a larger GPU."
        )
    half = now.microbatch_rows // 2 * now.row_tokens
    file = Path(config.folder) / HALVED
    remedy = f"Set {key}={half}, which does not fit as it was."
    with os_errors_as(StorageError, f"{file}: cannot be written", remedy, ValueError):
        noted = read_json(file) if file.exists() else {}
        write_whole(file, json.dumps({**noted, key: half}) + "\n")
    return Halved(f"{key}={now.tokens_at_once} does not fit the memory of this GPU: all ranks start again with {half}")
