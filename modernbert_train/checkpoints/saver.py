"""Write checkpoints in the background: in a thread of each rank, one checkpoint at a time.

The step hands over a share of copied tensors and continues. Every rank's thread writes its own share; rank 0's thread
makes the folder first, collects the results of all ranks, and renames the checkpoint. No collective is used. The thread
hashes, writes and waits for the disk, which all release Python's lock.

All threads end the same way: the checkpoint is whole, or all have the same error. `wait` raises it, which training
calls on all ranks at the same step: before the next checkpoint, at the end, and at the step after a failure, which the
ranks announce with the numbers of the step (save_requests.py).
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.checkpoint import (
    Part,
    Share,
    begin,
    finish,
    folder_of,
    storage_errors,
    write_part,
)
from modernbert_train.checkpoints.removal import clean
from modernbert_train.checkpoints.verified import METRICS
from modernbert_train.core.files import errors_to, os_errors_as, sync, warn
from modernbert_train.core.read_json import as_type
from modernbert_train.distributed.group import gather_from_all, num_ranks, on_rank_zero, this_rank
from modernbert_train.distributed.heartbeat import GRACE_SECONDS
from modernbert_train.distributed.rank_messages import Mailbox
from modernbert_train.errors import RunError, StorageError, UnstableRun

PATIENCE = 1800.0  # seconds without progress of a disk: a parallel file system fails over in 5 to 15 minutes
WARN = 60.0  # seconds without progress before a warning
_LOOK_SECONDS = 0.2
_KINDS: dict[str, type[RunError]] = {each.__name__: each for each in (RunError, StorageError, UnstableRun)}


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint to be written.

    Attributes:
        step: optimizer steps done.
        share: this rank's tensors; None if it writes none.
        copied: returns once they are copied to the CPU.
        total_bytes: of the tensors of all ranks.
        state, config_yaml: texts of its files.
        phase_end, milestone: reasons to keep it.
    """

    step: int
    share: Share | None
    copied: Callable[[], object]
    total_bytes: int
    state: str
    config_yaml: str
    phase_end: bool
    milestone: bool


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        step: optimizer steps done.
        bytes: of all its files; known to rank 0.
        seconds: of writing, in the background.
    """

    step: int
    bytes: int
    seconds: float


def ranks_that_see(folder: Path) -> list[int]:
    """Return the ranks that see rank 0's folder, and so can write to it; a collective."""
    token = on_rank_zero(lambda: _place_token(folder))
    seen = gather_from_all((folder / token).exists())
    on_rank_zero(lambda: (folder / token).unlink(missing_ok=True))
    return [rank for rank, sees in enumerate(seen) if sees]


def _place_token(folder: Path) -> str:
    # a new name each time: a file left by an earlier start on a rank's own disk would pass for a shared folder
    token = f".seen-by-all.{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
    with storage_errors(folder):
        for old_token in folder.glob(".seen-by-all.*"):
            old_token.unlink(missing_ok=True)
        (folder / token).touch()
    return token


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        checkpoints: the run's folder of checkpoints.
        keep: number of the newest ones to keep.
        writers: ranks that write a share of each; rank 0 is one of them.
        patience_seconds: limit for a rank's delay behind rank 0, and for a disk without progress; after it the run ends
            at its next checkpoint.
        failed: called in the thread when a checkpoint could not be written.
    """

    def __init__(
        self,
        checkpoints: Path,
        keep: int,
        writers: Sequence[int],
        patience_seconds: float,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._keep = keep
        self._writers = list(writers)
        self._patience = patience_seconds
        self._failed = failed
        self._rank = this_rank()
        self._mailbox = Mailbox() if num_ranks() > 1 else None
        self._number = 0  # of the checkpoint that is written
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: RunError | None = None
        self._moved = 0.0  # time of the last progress
        self._warned = False

    def start(self, snapshot: Snapshot) -> None:
        """Start writing a checkpoint. The previous one must have been awaited."""
        assert self._thread is None
        self._number += 1
        self._saved, self._warned = None, False
        self._note_progress()
        # daemon: Python waits for other threads at exit, so a hanging disk would keep a failed run alive
        self._thread = threading.Thread(target=self._run, args=(snapshot,), daemon=True, name="saver")
        self._thread.start()

    def take_saved(self) -> Saved | None:
        """Return the last checkpoint once it is written, without waiting; each is returned once."""
        if self._thread is not None and not self._thread.is_alive() and self._saved is not None:
            self._thread = None
        if self._thread is not None:  # still writing, or `wait` has an error to raise
            return None
        saved, self._saved = self._saved, None
        return saved

    def stall_warning(self) -> str | None:
        """Return a warning, once for each checkpoint, if its disk makes no progress while training continues."""
        still = time.monotonic() - self._moved
        if self._thread is None or not self._thread.is_alive() or self._warned or still < min(WARN, self._patience):
            return None
        self._warned = True
        return (
            f"{self._checkpoints}: the disk has taken nothing of a checkpoint for {still:.0f} seconds. Training "
            f"continues; the next checkpoint waits for it, and ends the run after {self._patience:g} seconds of that."
        )

    def wait(self, at_most: float = float("inf")) -> None:
        """Wait until the checkpoint is written. Every rank calls it.

        Args:
            at_most: seconds.

        Raises:
            StorageError: the disk has refused the checkpoint; no part of it is visible, and earlier ones are untouched.
            UnstableRun: weights or moments in it were not finite.
            RunError: another rank was lost meanwhile.
        """
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(min(_LOOK_SECONDS, at_most))  # in short waits: a write that hangs in the disk never ends
            now = time.monotonic()
            if now - self._moved > self._patience + GRACE_SECONDS or now - began > at_most:
                raise StorageError(
                    f"{self._checkpoints}: the disk has taken nothing of a checkpoint for {now - self._moved:.0f} "
                    f"seconds, and it was waited for {now - began:.0f}. Earlier checkpoints are untouched; fix the "
                    "disk or the network to it and run the same command again."
                )
        if self._thread is not None and self._error is None and self._saved is None:
            self._error = RunError(f"{self._checkpoints}: the thread that writes checkpoints ended without a word")
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self, at_most: float) -> None:
        """Wait for the checkpoint before a run ends with an error; its own errors become warnings."""
        with errors_to(warn, RunError):
            self.wait(at_most)

    def _note_progress(self) -> None:
        self._moved = time.monotonic()

    def _run(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        try:
            written = self._write(snapshot) if self._rank == 0 else self._write_share(snapshot)
            self._saved = Saved(snapshot.step, written, time.monotonic() - began)
        except BaseException as error:  # report every failure of this thread; a Rust panic is no Exception
            message = f"{folder_of(self._checkpoints, snapshot.step)}: writing it failed with {type(error).__name__}"
            self._error = error if isinstance(error, RunError) else RunError(f"{message}: {error}")
        if self._error is not None:
            self._failed()

    def _write(self, snapshot: Snapshot) -> int:
        """Write the checkpoint on rank 0: the folder, its own share, and the manifest."""
        final = folder_of(self._checkpoints, snapshot.step)
        staging: Path | None = None
        try:
            with storage_errors(final):
                self._forget(self._number - 2)  # not the last one's: a slower rank may still be reading its "end"
                snapshot.copied()
                staging = begin(final, snapshot.total_bytes)
                self._post("begun", {"staging": staging.name})  # the name has this process's id
                began = time.monotonic()
                assert snapshot.share is not None
                parts = [write_part(staging, snapshot.share, self._note_progress)]
                # the others began with this rank: this admits a disk three times as slow as this rank's, plus a stall
                parts += self._others(final, self._patience + 2 * (time.monotonic() - began))
                _refuse_not_finite(snapshot.step, parts)
                with suppress(FileNotFoundError):  # the run has no record yet
                    sync(self._checkpoints.parent / METRICS)  # a resumed run does not repeat these steps
                written = finish(
                    *(staging, final, parts),
                    state=snapshot.state,
                    config_yaml=snapshot.config_yaml,
                    phase_end=snapshot.phase_end,
                    milestone=snapshot.milestone,
                )
                self._note_progress()
        except BaseException as error:  # the other ranks wait for a message after every error
            self._post_error("begun" if staging is None else "end", error)
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        self._post("end", {})  # it is whole now, also if removing older ones fails
        not_removed = (
            f"{final} is written; those that checkpoint.keep={self._keep} no longer keeps could not be removed"
        )
        with errors_to(warn, StorageError), os_errors_as(StorageError, not_removed, "The next checkpoint tries again."):
            clean(self._checkpoints, self._keep)
        return written

    def _others(self, final: Path, seconds: float) -> list[Part]:
        """Collect the parts of the other ranks."""
        ranks = [rank for rank in self._writers if rank != 0]
        if self._mailbox is None or not ranks:
            return []
        try:
            answers = self._mailbox.collect([self._key(f"part/{rank}") for rank in ranks], seconds, self._note_progress)
        except TimeoutError as error:
            late = ", ".join(key.rpartition("/")[2] for key in error.args[0])
            raise StorageError(
                f"{final}: cannot write the checkpoint: rank {late} has sent nothing for {seconds:.0f} seconds. "
                "Earlier checkpoints are untouched; look at its disk and run the same command again."
            ) from None
        return [as_type(Part, _checked(answer)) for answer in answers]

    def _write_share(self, snapshot: Snapshot) -> int:
        """Write the share of another rank, then wait for rank 0's result."""
        assert self._mailbox is not None
        final, began = folder_of(self._checkpoints, snapshot.step), time.monotonic()
        answer = self._receive("begun", 2 * self._patience)
        try:
            if snapshot.share is not None:
                snapshot.copied()
                with storage_errors(final):
                    part = write_part(self._checkpoints / answer["staging"], snapshot.share, self._note_progress)
                self._post(f"part/{self._rank}", asdict(part))
        except BaseException as error:  # as above; rank 0 hands it back with its own "end"
            self._post_error(f"part/{self._rank}", error)
        # rank 0 writes its own share first, and then waits for all others
        self._receive("end", 2 * self._patience + 4 * (time.monotonic() - began))
        return 0

    def _receive(self, name: str, seconds: float) -> dict[str, Any]:
        """Wait for rank 0's message about the checkpoint and return it; raise the error that it reports."""
        assert self._mailbox is not None
        try:
            (answer,) = self._mailbox.collect([self._key(name)], seconds, self._note_progress)
        except TimeoutError:
            raise RunError(
                f"rank 0 has not answered for {seconds:.0f} seconds whether a checkpoint is written. Read its log, and "
                "start again: the run resumes from its newest checkpoint."
            ) from None
        return _checked(answer)

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _post(self, name: str, message: dict[str, Any]) -> None:
        if self._mailbox is not None:
            self._mailbox.post(self._key(name), message)

    def _post_error(self, name: str, error: BaseException) -> None:
        kind = type(error).__name__ if isinstance(error, RunError) else RunError.__name__
        text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        self._post(name, {"error": text, "kind": kind})

    def _forget(self, number: int) -> None:
        """Delete messages about the checkpoint before last; all ranks have read them."""
        if self._mailbox is not None and number > 0:
            self._mailbox.forget(
                [f"{number}/{name}" for name in ("begun", "end", *(f"part/{rank}" for rank in self._writers[1:]))]
            )


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a message; raise it if it is an error."""
    if "error" in answer:
        raise _KINDS.get(answer["kind"], RunError)(answer["error"])
    return answer


def _refuse_not_finite(step: int, parts: Sequence[Part]) -> None:
    if damaged := list(dict.fromkeys(name for part in parts for name in part.not_finite)):
        raise UnstableRun(
            f"step {step}: {len(damaged)} weights or moments are not finite, {damaged[0]} first, so no checkpoint is "
            "written; those there are untouched and the same command resumes from them. Lower optim.lr if this "
            "happens again."
        )
