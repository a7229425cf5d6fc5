"""The process that copies a run's checkpoints to its second home, behind the run and without torch.

It looks at the run's folder and at the store, and copies what is due: the newest checkpoint, and all that are kept for
good. A file is read once, hashed against the manifest on the way, read back from the store and hashed again; then the
manifest follows. What fails is reported and tried again, for as long as the run lasts. The run waits for it at its end
alone, and not for a store that stands still.

Standard input says when the run has ended: by being closed. Standard output has a line of JSON for whatever happened.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.manifest import MANIFEST, MOST_BYTES, FileHash, Manifest, kept_steps, read_manifest
from modernbert_train.checkpoints.store import RECORD, Store
from modernbert_train.core.files import saying
from modernbert_train.distributed.orphans import die_with
from modernbert_train.errors import RunError, StorageError

RECORDS = (
    "resolved.json", "data.json", "metrics.jsonl", "samples.jsonl", "starts.jsonl", "faults.jsonl", "evaluations.jsonl",
)  # fmt: skip
STOOD_STILL = 76  # exit code: the store took nothing for too long, and cannot be interrupted
_STEP = re.compile(r"step-(\d{8,})")
_LOOK_SECONDS = 1.0
_MOST_MISSED = 5  # a run removes a checkpoint file by file, within seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@dataclass(frozen=True)
class Order:
    """What the copier is started with.

    Attributes:
        folder: of the run.
        url: checkpoint.copy_to.
        run: its name.
        keep: newest checkpoints to keep in the store, beside those kept for good.
        timeout_seconds: nothing that moves for so long has failed.
        parent: the process that it ends with.
    """

    folder: str
    url: str
    run: str
    keep: int
    timeout_seconds: float
    parent: int


class Copier:
    """Copies what is due.

    Args:
        order: what and where.
        store: the run's folder there.
    """

    def __init__(self, order: Order, store: Store) -> None:
        self._order = order
        self._store = store
        self._folder = Path(order.folder)
        self._missed: Counter[int] = Counter()  # times that a file of a checkpoint was not there
        self._there: dict[int, Manifest] | None = None  # what the store has, as far as this process has seen to it

    def forget(self) -> None:
        """Look at the store anew: something went wrong."""
        self._there = None

    def copy_one(self) -> dict[str, Any] | None:
        """Copy the checkpoint that is due first, and remove what is in the store beyond what is kept.

        Returns:
            What was done, for the record; None when nothing is due.

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
        """Manifests of the store; one that is not the local one's of that step is another's, and replaced."""
        found = {}
        for step, name in self._store.steps().items():
            with suppress(RunError):  # it is damaged, so it goes, or is written again
                found[step] = manifest_of(self._store, name)
        return found

    def copy(self, step: int, manifest: Manifest) -> bool:
        """Copy a checkpoint, with the run's small files as they are now, and its manifest last.

        Args:
            step: of it.
            manifest: of it, as it is here.

        Returns:
            Whether it was still there to be copied: the run removes what it does not keep.

        Raises:
            RunError: the store or the disk refuses, or what the store gives back is not what is here.
        """
        name = step_name(step)
        with ExitStack() as stack:
            try:  # open, they stay whole even when the run removes them
                files = {
                    each: stack.enter_context((self._folder / "checkpoints" / name / each).open("rb"))
                    for each in [*manifest.files, MANIFEST]
                }
                text = files.pop(MANIFEST).read()
            except FileNotFoundError as error:
                self._missed[step] += 1
                if self._missed[step] > _MOST_MISSED:
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
                if (found := self._store.digest(f"{name}/{each}")) != manifest.files[each]:
                    self._store.remove_folder(name)
                    raise StorageError(
                        f"{self._store.url}/{name}/{each}: the store gives back other bytes than it was given: "
                        f"{found}, {manifest.files[each]} were written. It is copied again."
                    )
            self.copy_records()  # a checkpoint that is there has the record of its steps beside it
            self._store.write(f"{name}/{MANIFEST}", BytesIO(text))
            if self._store.read(f"{name}/{MANIFEST}", len(text) + 1) != text:
                self._store.remove_folder(name)
                raise StorageError(f"{self._store.url}/{name}/{MANIFEST}: the store gives back other bytes.")
        return True

    def copy_records(self) -> None:
        """Copy the run's small files, as they are now."""
        contents = {name: path.read_bytes() for name in RECORDS if (path := self._folder / name).exists()}
        for name, content in contents.items():
            self._store.write(f"{RECORD}/{name}", BytesIO(content))
            if (found := self._store.digest(f"{RECORD}/{name}")) != (written := FileHash.of_bytes(content)):
                raise StorageError(
                    f"{self._store.url}/{RECORD}/{name}: the store gives back other bytes than it was given: {found}, "
                    f"{written} were written. It is copied again."
                )

    def _prune(self) -> list[int]:
        """Remove what is kept for nothing, and what a copy left that broke off; returns the steps removed."""
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


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def local_manifests(checkpoints: Path) -> dict[int, Manifest]:
    """Of the checkpoints in a run's folder; a damaged manifest is for resuming to tell."""
    found = {}
    for path in checkpoints.glob("step-*"):
        if _STEP.fullmatch(path.name):
            with suppress(StorageError):
                manifest = read_manifest(path)
                found[manifest.step] = manifest
    return found


def manifest_of(store: Store, name: str, folder: Path | None = None) -> Manifest:
    """The manifest of a checkpoint in a store, made sure of as a local one is.

    Args:
        store: the run's folder there.
        name: step-NNNNNNNN.
        folder: where it is left; None: nowhere.

    Raises:
        StorageError: it is damaged, or lists what is no file of a checkpoint.
    """
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch) / name
        place.mkdir(exist_ok=True)
        (place / MANIFEST).write_bytes(store.read(f"{name}/{MANIFEST}", MOST_BYTES))
        with saying(f"{store.url}/{name}: "):
            return read_manifest(place)


class _Movement:
    """When something last moved, for whoever watches over it."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.bytes = 0
        self.at_work = False

    def __call__(self, count: int) -> None:
        self.bytes += count
        self.last = time.monotonic()


def follow(order: Order, closed: threading.Event) -> int:
    """Copy until the run has ended and nothing is due; returns the exit code."""
    movement = _Movement()
    threading.Thread(target=_watch, args=(movement, order.timeout_seconds), daemon=True).start()
    pause, told, copier = _FIRST_PAUSE, "", None
    failing_since: float | None = None
    while True:
        movement.last, movement.at_work = time.monotonic(), True
        ended = closed.is_set()  # asked before it looks: what was saved while it looked would be overlooked
        try:
            copier = copier or Copier(order, Store(order.url, order.run, order.timeout_seconds, movement))
            done = copier.copy_one()
            pause, told, failing_since = _FIRST_PAUSE, "", None
        except (RunError, OSError) as error:
            movement.at_work = False
            if copier is not None:
                copier.forget()
            failing_since = failing_since or time.monotonic()
            if str(error) != told:
                told = str(error)
                say({"kind": "failed", "error": told})
            if closed.is_set() and time.monotonic() - failing_since > order.timeout_seconds:
                return StorageError.exit_code
            closed.wait(pause) if not closed.is_set() else time.sleep(min(pause, 5.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        movement.at_work = False
        if done is not None:
            say(done)
        elif ended:
            return 0
        else:
            closed.wait(_LOOK_SECONDS)


def _watch(movement: _Movement, timeout_seconds: float) -> None:
    """End the process when the store's library stands still in a call that nothing can interrupt."""
    while True:
        time.sleep(min(1.0, timeout_seconds / 4))
        if movement.at_work and time.monotonic() - movement.last > timeout_seconds:
            error = f"nothing moved for {timeout_seconds:g} s (checkpoint.copy_timeout_seconds)"
            say({"kind": "failed", "error": error})
            os._exit(STOOD_STILL)


def say(event: dict[str, Any]) -> None:
    """A line to whoever started this process; if nobody reads it any more, that is the end."""
    try:
        sys.stdout.write(json.dumps(event | {"time": round(time.time(), 3)}) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os._exit(RunError.exit_code)


def start_of(order: Order) -> list[str]:
    """The command line of the process."""
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
    os._exit(code)  # not after threads of the store's library
