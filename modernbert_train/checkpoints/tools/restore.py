"""Go back to an older checkpoint: the next start of the run resumes from it.

RUN/checkpoints/superseded/20261123-001500-back-to-step-00000500/   the newer checkpoints, and a copy of metrics.jsonl

Newer checkpoints are set aside, not removed, the newest first: after an interruption the run is at a step between,
and the same command completes it. The next start drops the lines of later steps from the run's record, as at every
resume. Newer copies in the replica are set aside too, or the next start would fetch them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from modernbert_train.checkpoints.checkpoint import Checkpoint, folder_of, verify
from modernbert_train.checkpoints.replica import fetch
from modernbert_train.checkpoints.resume_rules import refuse_average
from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.checkpoints.store import Store
from modernbert_train.checkpoints.tools.selection import Selection
from modernbert_train.checkpoints.verified import METRICS, SUPERSEDED, step_folders, step_of
from modernbert_train.core.files import os_errors_as, saying, sync
from modernbert_train.core.own_files import require_own_files
from modernbert_train.errors import ConfigError, StorageError

_BUSY = "Its checkpoints are moved only while it is not training: stop that job first; it saves and ends with 75."


def restore(selection: Selection, step: int, store: Store | None, say: Callable[[str], None]) -> None:
    """Make a checkpoint the newest of its run.

    Args:
        selection: the run.
        step: of the checkpoint, in the run or in its replica.
        store: the replica; None if it is not used.
        say: prints a line.

    Raises:
        ConfigError: the run is in use, or holds an average, which cannot be continued.
        StorageError: the checkpoint is missing or damaged, or a disk or store refuses.
    """
    run = selection.run
    if run is None:
        raise ConfigError(f"{selection.checkpoints}: not in the folder of a run, so there is nothing to restore.")
    require_own_files(run)  # a link would be written through
    remedy = "Fix the disk, and give the same command again."
    with os_errors_as(StorageError, f"{run}: cannot be written", remedy), take_lock(run, _BUSY):
        restored = _find(selection, step, store, say)
        if restored.is_average:
            refuse_average(run)
        into = f"{SUPERSEDED}/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-back-to-step-{step:08d}"
        _set_aside_copies(store, step, into, say)
        newer = [folder for folder in step_folders(selection.checkpoints) if step_of(folder) > step]
        if newer:
            _set_aside(newer, selection.checkpoints / into, run / METRICS)
            say(f"set aside in {selection.checkpoints / into}: {', '.join(folder.name for folder in newer)}")
        say(
            f"the next start of {run} resumes from step {step:,}, {restored.state.tokens:,} tokens, phase "
            f"{restored.state.phase}; its record of later steps is dropped then"
        )


def _find(selection: Selection, step: int, store: Store | None, say: Callable[[str], None]) -> Checkpoint:
    folder = folder_of(selection.checkpoints, step)
    try:
        if not folder.is_dir():
            raise selection.unknown(step)
        return verify(folder)
    except StorageError as error:
        if store is not None and fetch(store, step, selection.checkpoints, say):
            say(f"{folder.name} was brought back from {store.url}: {error}")
            return verify(folder)
        raise StorageError(f"{error} Nothing was changed; name one that `checkpoints verify` finds valid.") from None


def _set_aside_copies(store: Store | None, step: int, into: str, say: Callable[[str], None]) -> None:
    """Set newer copies aside, before the run changes: an interruption here leaves the run as it was."""
    later = [] if store is None else [name for each, name in store.steps().items() if each > step]
    for name in later:
        assert store is not None
        with saying(
            after=f" Copies in {store.url} that are newer would be brought back by the next start, so nothing was "
            "changed here. Give the same command again when the store answers; or leave the store out with --local "
            "and start the run with checkpoint.copy_to=null."
        ):
            store.move_folder(name, f"{into}/{name}")
        say(f"{name} is set aside in {store.url}/{into}")


def _set_aside(newer: Sequence[Path], into: Path, record: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    if record.exists():
        shutil.copyfile(record, into / record.name)
        sync(into / record.name)
    for folder in reversed(newer):
        folder.rename(into / folder.name)
    for changed in (into, newer[0].parent):
        sync(changed)
