"""The run's side of its replica: start the copier, read its events, and fetch missing checkpoints.

The copier is a separate process: it shares neither interpreter nor memory with the training step, so a store that
fails, hangs or is slow does not stop training. If it dies it is started again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from modernbert_train.checkpoints.copier import (
    RECORDS,
    STORE_HUNG,
    Order,
    local_manifests,
    manifest_of,
    start_of,
)
from modernbert_train.checkpoints.manifest import CONFIG_YAML, step_name
from modernbert_train.checkpoints.store import RECORD, Store
from modernbert_train.checkpoints.verified import METRICS
from modernbert_train.config.schema import CheckpointConfig
from modernbert_train.core.files import append_line, free_bytes, os_errors_as, publish, write_whole
from modernbert_train.errors import ConfigError, DataError, RunError, StoppedEarly, StorageError

COPIES = "copies.jsonl"
_PAUSE, _MAX_PAUSE = 2.0, 60.0  # between two starts of a copier that died
_BACK = ".partial-back-"


class Replica:
    """Context manager that keeps a copier running, and waits for the last copies when the block ends without an error.

    Args:
        settings: the run's section checkpoint; without copy_to nothing happens.
        folder: of the run; its name is also the name in the store.
        say: prints a line.
    """

    def __init__(self, settings: CheckpointConfig, folder: Path, say: Callable[[str], None]) -> None:
        self._settings, self._folder = settings, folder
        self._say = say
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._guard = threading.Lock()
        self._failed: str | None = None
        self._reported: str | None = None

    def __enter__(self) -> Replica:
        return self

    def bring_back(self, *, fresh: bool) -> None:
        """Fetch the newest checkpoint, see `fetch_newest`; a fresh start is refused if there is one."""
        if fresh:
            refuse_fresh(self._settings, self._folder.name)
        else:
            fetch_newest(self._settings, self._folder, self._say)

    def start(self) -> None:
        """Start the copier; called on rank 0, once the run holds its folder's lock."""
        if self._settings.copy_to is None or self._thread is not None:
            return
        self._thread = threading.Thread(target=self._keep_at_work, name="copies", daemon=True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if kind is None or issubclass(kind, StoppedEarly):
            self._wait()
        self._ending.set()
        with self._guard:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
        self._thread.join(10)

    def _wait(self) -> None:
        """Wait until everything is copied, or the store has failed for checkpoint.copy_timeout_seconds."""
        assert self._thread is not None
        self._ending.set()
        with self._guard:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
        self._thread.join(1.0)
        if self._thread.is_alive():
            self._say(f"waiting for the copies in {self._settings.copy_to}")
            self._thread.join()
        if self._failed is not None:
            self._say(
                f"warning: not all checkpoints are copied to {self._settings.copy_to}: {self._failed} They "
                "are all here; the same command copies the missing ones."
            )

    def _keep_at_work(self) -> None:
        pause = _PAUSE
        while True:
            began = time.monotonic()
            code = self._follow()
            if code == 0:
                self._failed = None
                return
            if self._ending.is_set():
                self._failed = self._failed or "the copier ended early."
                return
            if code not in (STORE_HUNG, StorageError.exit_code):
                self._heard({"kind": "failed", "error": f"the copier ended (exit code {code}); it is started again"})
            if time.monotonic() - began > _MAX_PAUSE:
                pause = _PAUSE
            self._ending.wait(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _follow(self) -> int:
        """Start a copier and read its events until it ends; return its exit code."""
        settings = self._settings
        assert settings.copy_to is not None
        order = Order(
            folder=str(self._folder),
            url=settings.copy_to,
            run=self._folder.name,
            keep=settings.copy_keep or settings.keep,
            timeout_seconds=settings.copy_timeout_seconds,
            parent=os.getpid(),
        )
        with self._guard:
            self._process = process = subprocess.Popen(
                start_of(order),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run
            )
            if self._ending.is_set() and process.stdin is not None:
                process.stdin.close()
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with suppress(ValueError):
                    self._heard(json.loads(line))
        code = process.wait()
        with self._guard, suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        return code

    def _heard(self, event: dict[str, Any]) -> None:
        with suppress(OSError):  # the run reports a full disk
            append_line(self._folder / COPIES, json.dumps(event))
        if event["kind"] == "failed":
            self._failed = str(event["error"])
            if self._failed != self._reported:
                self._reported = self._failed
                self._say(f"warning: checkpoints are not being copied: {self._failed} Training continues.")
        elif event["kind"] == "copied":
            if self._failed is not None:
                self._say("checkpoints are copied again")
            self._failed = self._reported = None
            self._say(
                f"{step_name(event['step'])} is in {self._settings.copy_to}, verified "
                f"({event['bytes'] / 1e6:,.1f} MB, {event['seconds']:.1f} s)"
            )


def fetch_newest(settings: CheckpointConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Fetch the newest whole checkpoint of a run's replica, if it is newer than all local ones.

    Args:
        settings: the run's section checkpoint.
        folder: of the run.
        say: prints a line.

    Raises:
        StorageError: the store cannot be read and no checkpoint is here, so a start would begin from zero; or this
            disk refuses the files.
        ConfigError: the store refuses the credentials, and no checkpoint is here.
    """
    checkpoints = folder / "checkpoints"
    newest = max(local_manifests(checkpoints), default=None)
    try:
        if (store := store_of(settings, folder.name)) is None:
            return
        copies = store.steps()
    except RunError as error:
        if newest is None:
            raise type(error)(
                f"{error} No checkpoint is here, and whether one is there cannot be known, so nothing is started from "
                "zero. Start again when the store answers; or unset checkpoint.copy_to."
            ) from None
        say(f"warning: the replica cannot be read, so the local checkpoints are used: {error}")
        return
    for step in sorted(copies, reverse=True):
        if newest is not None and step <= newest:
            return
        if _fetched(store, copies[step], checkpoints, say):
            _fetch_records(store, folder, checkpoints / copies[step], say)
            say(
                f"{copies[step]} brought back from {store.url}: "
                + ("nothing is here" if newest is None else "it is newer")
            )
            return
    if copies:
        raise StorageError(
            f"{store.url}: no checkpoint there is whole, and none is here. Restore one from a copy; or remove the "
            "folder there to train from the start."
        )


def refuse_fresh(settings: CheckpointConfig, name: str) -> None:
    """Refuse a fresh start if the replica's checkpoints would be fetched at the next start.

    Raises:
        ConfigError: the replica holds checkpoints of the run.
    """
    if (store := store_of(settings, name)) is not None and (copies := store.steps()):
        raise ConfigError(
            f"--fresh: {store.url} holds checkpoints of this run up to step {max(copies):,}, from which the next start "
            "would resume. Move that folder away, or give this run another name=."
        )


def fetch(store: Store, step: int, checkpoints: Path, say: Callable[[str], None]) -> bool:
    """Fetch one checkpoint from a replica; it replaces a local one of that step.

    Args:
        store: the run's folder in it.
        step: of the checkpoint.
        checkpoints: the run's folder of checkpoints.
        say: prints a line.

    Returns:
        False if the replica lacks that step, or it is damaged.

    Raises:
        RunError: the store cannot be read, or this disk refuses it.
    """
    name = store.steps().get(step)
    return name is not None and _fetched(store, name, checkpoints, say)


def store_of(settings: CheckpointConfig, name: str) -> Store | None:
    """Open the replica of a run of that name; None without checkpoint.copy_to.

    Raises:
        RunError: it cannot be reached.
    """
    if settings.copy_to is None:
        return None
    return Store(settings.copy_to, name, settings.copy_timeout_seconds)


def _fetched(store: Store, name: str, checkpoints: Path, say: Callable[[str], None]) -> bool:
    """Fetch a checkpoint; return True if it is whole, and renamed to its final name.

    Raises:
        StorageError: this disk refuses it.
    """
    staging = checkpoints / f"{name}{_BACK}{os.getpid()}"
    try:
        with os_errors_as(StorageError, f"{checkpoints}: cannot be written", "Fix the disk."):
            checkpoints.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
            manifest = manifest_of(store, name, staging)
            needed, free = sum(file.bytes for file in manifest.files.values()), free_bytes(checkpoints)
            if free < needed:
                raise StorageError(f"{checkpoints}: {name} needs {needed:,} bytes, {free:,} are free. Free some space.")
            for each, expected in manifest.files.items():
                if (digest := store.fetch(f"{name}/{each}", staging / each)) != expected:
                    say(f"warning: passed over a damaged copy: {store.url}/{name}/{each}: {digest}, not {expected}")
                    return False
            replaced = publish(staging, checkpoints / name)
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)
            return True
    except (StorageError, DataError) as error:  # DataError: one of its files is missing in the store
        if str(error).startswith(store.url):
            say(f"warning: passed over a damaged copy: {error}")
            return False
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_records(store: Store, folder: Path, checkpoint: Path, say: Callable[[str], None]) -> None:
    """Fetch the run's small files that are missing here; its configuration is copied from the checkpoint."""
    if not (folder / CONFIG_YAML).exists():
        shutil.copyfile(checkpoint / CONFIG_YAML, folder / CONFIG_YAML)
    for name in RECORDS:
        if (folder / name).exists():
            continue
        if store.has(f"{RECORD}/{name}"):
            write_whole(folder / name, store.read(f"{RECORD}/{name}", 1 << 32).decode("utf-8", "replace"))
        elif name == METRICS:
            say(f"warning: {store.url}/{RECORD}/{name}: not there, so it begins here, and reports with it")
