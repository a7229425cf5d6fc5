"""Copy a run's checkpoints to its replica in a store, in a background process without torch.

It compares the run's folder with the store, and copies the newest checkpoint and all permanent ones. A file is read
once, hashed against the manifest on the way, read back from the store and hashed again; the manifest follows last.
Failures are reported and retried as long as the run lasts. The run waits for the copies only at its end, and not for a
store that hangs.

The parent closes standard input when the run has ended. Standard output has a line of JSON for each event.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.manifest import (
    MANIFEST,
    MAX_BYTES,
    FileHash,
    Manifest,
    kept_steps,
    read_manifest,
    step_folders,
    step_name,
)
from modernbert_train.checkpoints.store import RECORD, Store
from modernbert_train.core.files import saying
from modernbert_train.distributed.orphans import die_with
from modernbert_train.errors import RunError, StorageError

RECORDS = (
    "resolved.json", "data.json", "metrics.jsonl", "samples.jsonl", "starts.jsonl", "faults.jsonl", "evaluations.jsonl",
)  # fmt: skip
STORE_HUNG = 76  # exit code: the store made no progress for too long, and cannot be interrupted
_LOOK_SECONDS = 1.0
_MAX_MISSED = 5  # a run removes a checkpoint file by file, within seconds
_FIRST_PAUSE, _MAX_PAUSE = 1.0, 60.0


@dataclass(frozen=True)
class Order:
    """Arguments of the copier.

    Attributes:
        folder: of the run.
        url: checkpoint.copy_to.
        run: its name.
        keep: newest checkpoints to keep in the store, in addition to permanent ones.
        timeout_seconds: without progress, after which a transfer has failed.
        parent: process id; the copier ends with it.
    """

    folder: str
    url: str
    run: str
    keep: int
    timeout_seconds: float
    parent: int


class Copier:
    """Copies checkpoints that the store lacks.

    Args:
        order: source and target.
        store: the run's folder in it.
    """

    def __init__(self, order: Order, store: Store) -> None:
        self._order = order
        self._store = store
        self._folder = Path(order.folder)
        self._missed: Counter[int] = Counter()  # step -> how often a file of its checkpoint was missing
        self._there: dict[int, Manifest] | None = None  # known content of the store

    def forget(self) -> None:
        """Read the store's content again, after an error."""
        self._there = None

    def copy_one(self) -> dict[str, Any] | None:
        """Copy the first checkpoint that the store lacks, and remove from the store the ones that are no longer kept.

        Returns:
            The event, for the record; None if the store lacks nothing.

        Raises:
            RunError: the store or the disk refuses.
        """
        here = local_manifests(self._folder / "checkpoints")
        if self._there is None:
            self._there = self._known(here)
        due = [step for step in here if self._there.get(step) != here[step]]
        kept = [step for step in due if here[step].phase_end or here[step].milestone]
        newest = max(here, default=None)
        first = newest if newest in due else min(kept, default=None)
        if first is None:
            return None
        started = time.monotonic()
        if not self.copy(first, here[first]):  # the run has removed it, or begun to
            return None
        self._there[first] = here[first]
        removed = self._prune()
        size = sum(file.bytes for file in here[first].files.values())
        return {
            "kind": "copied",
            "step": first,
            "bytes": size,
            "seconds": round(time.monotonic() - started, 3),
            "removed": removed,
        }

    def _known(self, here: dict[int, Manifest]) -> dict[int, Manifest]:
        """Read the manifests in the store; one that differs from the local one of its step is replaced later."""
        manifests = {}
        for step, name in self._store.steps().items():
            with suppress(RunError):  # it is damaged, so it is removed or written again
                manifests[step] = manifest_of(self._store, name)
        return manifests

    def copy(self, step: int, manifest: Manifest) -> bool:
        """Copy a checkpoint, with the present small files of the run, and its manifest last.

        Args:
            step: of the checkpoint.
            manifest: the local one.

        Returns:
            False if the run has removed the checkpoint meanwhile.

        Raises:
            RunError: the store or the disk refuses, or the store returns other bytes.
        """
        name = step_name(step)
        with ExitStack() as stack:
            try:  # open files stay readable when the run removes them
                files = {
                    each: stack.enter_context((self._folder / "checkpoints" / name / each).open("rb"))
                    for each in [*manifest.files, MANIFEST]
                }
                text = files.pop(MANIFEST).read()
            except FileNotFoundError as error:
                self._missed[step] += 1
                if self._missed[step] > _MAX_MISSED:
                    raise StorageError(f"{error.filename}: is missing, so {name} is not copied.") from None
                return False
            self._store.remove_file(f"{name}/{MANIFEST}")
            for each, file in files.items():
                if self._store.write(f"{name}/{each}", file) != manifest.files[each]:
                    self._store.remove_folder(name)
                    raise StorageError(
                        f"{file.name}: damaged on this disk since it was written, so it is not copied. Look at the "
                        "disk; the next checkpoint is copied again."
                    )
            for each in files:
                self._verify(f"{name}/{each}", manifest.files[each], name)
            self.copy_records()  # a checkpoint in the store comes with the record of its steps
            self._write(f"{name}/{MANIFEST}", text, name)
        return True

    def _write(self, file: str, content: bytes, checkpoint: str | None = None) -> None:
        """Write a small file and verify it."""
        self._store.write(file, BytesIO(content))
        self._verify(file, FileHash.of_bytes(content), checkpoint)

    def _verify(self, file: str, written: FileHash, checkpoint: str | None = None) -> None:
        """Read a file back; if it differs remove its checkpoint from the store and raise StorageError."""
        if (digest := self._store.digest(file)) != written:
            if checkpoint is not None:
                self._store.remove_folder(checkpoint)
            raise StorageError(
                f"{self._store.url}/{file}: the store gives back other bytes than it was given: {digest}, {written} "
                "were written. It is copied again."
            )

    def copy_records(self) -> None:
        """Copy the present small files of the run."""
        contents = {name: path.read_bytes() for name in RECORDS if (path := self._folder / name).exists()}
        for name, content in contents.items():
            self._write(f"{RECORD}/{name}", content)

    def _prune(self) -> list[int]:
        """Remove checkpoints that are no longer kept, and remains of interrupted copies; return the removed steps."""
        assert self._there is not None
        newest, kept = max(self._there), kept_steps(self._there.values(), self._order.keep)
        removed = []
        for name in sorted(self._store.folders()):
            step = int(name.removeprefix("step-"))
            if step not in kept and step <= newest:
                self._store.remove_folder(name)
                self._there.pop(step, None)
                removed.append(step)
        return removed


def local_manifests(checkpoints: Path) -> dict[int, Manifest]:
    """Read the manifests of the checkpoints in a run's folder; damaged ones are left out: resuming reports them."""
    manifests = {}
    for path in step_folders(checkpoints):
        with suppress(StorageError):
            manifest = read_manifest(path)
            manifests[manifest.step] = manifest
    return manifests


def manifest_of(store: Store, name: str, folder: Path | None = None) -> Manifest:
    """Read the manifest of a checkpoint in a store, verified like a local one.

    Args:
        store: the run's folder in it.
        name: step-NNNNNNNN.
        folder: receives the manifest; None keeps no copy.

    Raises:
        StorageError: it is damaged, or lists a file that no checkpoint has.
    """
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        target = folder or Path(scratch) / name
        target.mkdir(exist_ok=True)
        (target / MANIFEST).write_bytes(store.read(f"{name}/{MANIFEST}", MAX_BYTES))
        with saying(f"{store.url}/{name}: "):
            return read_manifest(target)


class _Movement:
    """Time of the last progress, for the watchdog."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.bytes = 0
        self.at_work = False

    def __call__(self, count: int) -> None:
        self.bytes += count
        self.last = time.monotonic()


def follow(order: Order, closed: threading.Event) -> int:
    """Copy until the run has ended and the store lacks nothing; return the exit code."""
    movement = _Movement()
    threading.Thread(target=_watch, args=(movement, order.timeout_seconds), daemon=True).start()
    pause, reported, copier = _FIRST_PAUSE, "", None
    failing_since: float | None = None
    while True:
        movement.last, movement.at_work = time.monotonic(), True
        ended = closed.is_set()  # read first, or a checkpoint saved during the comparison would be overlooked
        try:
            copier = copier or Copier(order, Store(order.url, order.run, order.timeout_seconds, movement))
            done = copier.copy_one()
            pause, reported, failing_since = _FIRST_PAUSE, "", None
        except (RunError, OSError) as error:
            movement.at_work = False
            if copier is not None:
                copier.forget()
            failing_since = failing_since or time.monotonic()
            if str(error) != reported:
                reported = str(error)
                say({"kind": "failed", "error": reported})
            if closed.is_set() and time.monotonic() - failing_since > order.timeout_seconds:
                return StorageError.exit_code
            closed.wait(pause) if not closed.is_set() else time.sleep(min(pause, 5.0))
            pause = min(2 * pause, _MAX_PAUSE)
            continue
        movement.at_work = False
        if done is not None:
            say(done)
        elif ended:
            return 0
        else:
            closed.wait(_LOOK_SECONDS)


def _watch(movement: _Movement, timeout_seconds: float) -> None:
    """End the process when the store's library hangs in a call that cannot be interrupted."""
    while True:
        time.sleep(min(1.0, timeout_seconds / 4))
        if movement.at_work and time.monotonic() - movement.last > timeout_seconds:
            error = f"nothing moved for {timeout_seconds:g} s (checkpoint.copy_timeout_seconds)"
            say({"kind": "failed", "error": error})
            os._exit(STORE_HUNG)


def say(event: dict[str, Any]) -> None:
    """Write a line to the parent process; exit if the pipe is closed."""
    try:
        sys.stdout.write(json.dumps(event | {"time": round(time.time(), 3)}) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os._exit(RunError.exit_code)


def start_of(order: Order) -> list[str]:
    """Return the command line of the copier."""
    return [sys.executable, "-m", "modernbert_train.checkpoints.copier", json.dumps(asdict(order))]


def main() -> int:
    order = Order(**json.loads(sys.argv[1]))
    die_with(order.parent)
    closed = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=listen, daemon=True).start()
    return follow(order, closed)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads of the store's library
