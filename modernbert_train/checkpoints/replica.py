"""A run's side of its second home: starts the copier, follows it, and brings back what is missing here.

The copier is a process of its own: it shares neither interpreter nor memory with the training step, and a store that
fails, hangs or is slow stops nothing. If it dies it is started again.
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
    STOOD_STILL,
    Order,
    local_manifests,
    manifest_of,
    start_of,
    step_name,
)
from modernbert_train.checkpoints.manifest import CONFIG_YAML
from modernbert_train.checkpoints.store import RECORD, Store
from modernbert_train.checkpoints.verified import METRICS
from modernbert_train.config.schema import CheckpointConfig
from modernbert_train.core.files import append_line, free_bytes, os_errors_as, publish, write_whole
from modernbert_train.errors import ConfigError, DataError, RunError, StoppedEarly, StorageError

COPIES = "copies.jsonl"
_PAUSE, _LONGEST_PAUSE = 2.0, 60.0  # between two starts of a copier that died
_BACK = ".partial-back-"


class Replica:
    """Keeps a copier at work for as long as the block runs, and waits for what is due when the block ends in order.

    Args:
        settings: the run's section checkpoint; without copy_to nothing happens.
        folder: of the run, whose last part is its name there too.
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
        self._told_of: str | None = None

    def __enter__(self) -> Replica:
        return self

    def start(self) -> None:
        """Begin; called on rank 0, once the run's folder is its own."""
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
        """Until all that is due is copied, or the store has failed for checkpoint.copy_timeout_seconds."""
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
                "are all here; the same command copies what is missing."
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
            if code not in (STOOD_STILL, StorageError.exit_code):
                self._heard({"kind": "failed", "error": f"the copier ended (exit code {code}); it is started again"})
            if time.monotonic() - began > _LONGEST_PAUSE:
                pause = _PAUSE
            self._ending.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _follow(self) -> int:
        """Start a copier and read what it says to its end; returns its exit code."""
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
        with suppress(OSError):  # a full disk is told by the run
            append_line(self._folder / COPIES, json.dumps(event))
        if event["kind"] == "failed":
            self._failed = str(event["error"])
            if self._failed != self._told_of:
                self._told_of = self._failed
                self._say(f"warning: checkpoints are not being copied: {self._failed} Training continues.")
        elif event["kind"] == "copied":
            if self._failed is not None:
                self._say("checkpoints are copied again")
            self._failed = self._told_of = None
            self._say(
                f"{step_name(event['step'])} is in {self._settings.copy_to}, verified "
                f"({event['bytes'] / 1e6:,.1f} MB, {event['seconds']:.1f} s)"
            )


def bring_back(settings: CheckpointConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Fetch the newest whole checkpoint of a run's second home, where it is newer than all that are here.

    Args:
        settings: the run's section checkpoint.
        folder: of the run.
        say: prints a line.

    Raises:
        StorageError: the store cannot be asked and nothing is here, so that starting would start from zero; or this
            disk refuses what comes.
        ConfigError: the store refuses the credentials, and nothing is here.
    """
    checkpoints = folder / "checkpoints"
    newest = max(local_manifests(checkpoints), default=None)
    try:
        if (store := store_of(settings, folder.name)) is None:
            return
        there = store.steps()
    except RunError as error:
        if newest is None:
            raise type(error)(
                f"{error} No checkpoint is here, and whether one is there cannot be known, so nothing is started from "
                "zero. Start again when the store answers; or unset checkpoint.copy_to."
            ) from None
        say(f"warning: the second home cannot be asked, so what is here is taken: {error}")
        return
    for step in sorted(there, reverse=True):
        if newest is not None and step <= newest:
            return
        if _fetched(store, there[step], checkpoints, say):
            _fetch_records(store, folder, checkpoints / there[step], say)
            say(
                f"{there[step]} brought back from {store.url}: "
                + ("nothing is here" if newest is None else "it is newer")
            )
            return
    if there:
        raise StorageError(
            f"{store.url}: no checkpoint there is whole, and none is here. Restore one from a copy; or remove the "
            "folder there to train from the start."
        )


def refuse_fresh(settings: CheckpointConfig, name: str) -> None:
    """Refuse to begin anew what the second home would bring back at the next start.

    Raises:
        ConfigError: it holds checkpoints of the run.
    """
    if (store := store_of(settings, name)) is not None and (there := store.steps()):
        raise ConfigError(
            f"--fresh: {store.url} holds checkpoints of this run up to step {max(there):,}, from which the next start "
            "would resume. Move that folder away, or give this run another name=."
        )


def fetch(store: Store, step: int, checkpoints: Path, say: Callable[[str], None]) -> bool:
    """Bring one checkpoint back from a second home, in place of what is here of it.

    Args:
        store: the run's folder there.
        step: of the checkpoint.
        checkpoints: the run's folder of them.
        say: prints a line.

    Returns:
        Whether it came; not if there is none of that step, or it is damaged.

    Raises:
        RunError: the store cannot be asked, or this disk refuses it.
    """
    name = store.steps().get(step)
    return name is not None and _fetched(store, name, checkpoints, say)


def store_of(settings: CheckpointConfig, name: str) -> Store | None:
    """The second home of a run of that name; None if it has none.

    Raises:
        RunError: it cannot be reached.
    """
    if settings.copy_to is None:
        return None
    return Store(settings.copy_to, name, settings.copy_timeout_seconds)


def _fetched(store: Store, name: str, checkpoints: Path, say: Callable[[str], None]) -> bool:
    """Whether a checkpoint came whole; it then has its name here.

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
                if (found := store.fetch(f"{name}/{each}", staging / each)) != expected:
                    say(f"warning: passed over a damaged copy: {store.url}/{name}/{each}: {found}, not {expected}")
                    return False
            replaced = publish(staging, checkpoints / name)
            if replaced is not None:
                shutil.rmtree(replaced, ignore_errors=True)
            return True
    except (StorageError, DataError) as error:  # DataError: a file of it is missing there
        if str(error).startswith(store.url):
            say(f"warning: passed over a damaged copy: {error}")
            return False
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_records(store: Store, folder: Path, checkpoint: Path, say: Callable[[str], None]) -> None:
    """The run's small files, where there are none here; its configuration is that of the checkpoint."""
    if not (folder / CONFIG_YAML).exists():
        shutil.copyfile(checkpoint / CONFIG_YAML, folder / CONFIG_YAML)
    for name in RECORDS:
        if (folder / name).exists():
            continue
        if store.has(f"{RECORD}/{name}"):
            write_whole(folder / name, store.read(f"{RECORD}/{name}", 1 << 32).decode("utf-8", "replace"))
        elif name == METRICS:
            say(f"warning: {store.url}/{RECORD}/{name}: not there, so it begins here, and reports with it")
