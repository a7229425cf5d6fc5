"""Writes checkpoints behind the training step: in a thread of each rank, one checkpoint at a time.

The step gives a share of copied tensors and goes on. Every rank's thread writes its own share; that of rank 0 makes the
folder first, collects what all have written, and gives the checkpoint its name. Nothing here is a collective. The work
of the thread is hashing, writing and waiting for the disk, none of which holds Python's lock.

All threads come to the same end: the checkpoint is whole, or all have the same error. It is raised by `wait`, which
training calls on all ranks alike: before the next checkpoint, at the end, and at the step after a failure, of which the
ranks tell each other with the numbers of the step (save_requests.py).
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
    clean,
    finish,
    folder_of,
    refusals_told,
    write_part,
)
from modernbert_train.checkpoints.verified import METRICS
from modernbert_train.core.files import errors_to, os_errors_as, sync, warn
from modernbert_train.core.read_json import as_type
from modernbert_train.distributed.group import gather_from_all, num_ranks, on_rank_zero, this_rank
from modernbert_train.distributed.heartbeat import GRACE_SECONDS
from modernbert_train.distributed.mailbox import Mailbox
from modernbert_train.errors import RunError, StorageError, UnstableRun

PATIENCE = 1800.0  # seconds that a disk may take nothing: a parallel file system changes servers in 5 to 15 minutes
WARN = 60.0  # seconds after which that is said
_LOOK_SECONDS = 0.2
_KINDS: dict[str, type[RunError]] = {each.__name__: each for each in (RunError, StorageError, UnstableRun)}


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint to be written.

    Attributes:
        step: optimizer steps done.
        share: this rank's tensors; None where it writes none.
        copied: returns once they are there.
        total_bytes: of the tensors of all ranks.
        state, config_yaml: texts of its files.
        phase_end, milestone: what it is kept for.
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
        step: of it.
        bytes: of all its files; known to rank 0.
        seconds: that it took, behind the run.
    """

    step: int
    bytes: int
    seconds: float


def ranks_that_see(folder: Path) -> list[int]:
    """The ranks that have rank 0's folder before them, which can share in writing to it; a collective."""
    token = on_rank_zero(lambda: _place_token(folder))
    seen = gather_from_all((folder / token).exists())
    on_rank_zero(lambda: (folder / token).unlink(missing_ok=True))
    return [rank for rank, sees in enumerate(seen) if sees]


def _place_token(folder: Path) -> str:
    token = f".seen-by-all.{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
    with refusals_told(folder):
        for left in folder.glob(".seen-by-all.*"):
            left.unlink(missing_ok=True)
        (folder / token).touch()
    return token


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        checkpoints: the run's folder of them.
        keep: so many of the newest.
        writers: ranks that have a share in each; rank 0 is one of them.
        patience_seconds: a rank that is so much later than rank 0 with its share, or a disk that takes nothing for so
            long, has failed: the run ends if it cannot do without, which is at its next checkpoint.
        failed: is called, in the thread, when a checkpoint could not be written.
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
        self._moved = 0.0  # when it last came on
        self._warned = False

    def start(self, snapshot: Snapshot) -> None:
        """Write a checkpoint behind the run. The one before must have been awaited."""
        assert self._thread is None
        self._number += 1
        self._saved, self._warned = None, False
        self._tell()
        self._thread = threading.Thread(target=self._run, args=(snapshot,), daemon=True, name="saver")
        self._thread.start()

    def take_saved(self) -> Saved | None:
        """The last checkpoint, once it is written; each is given out once, and nothing is waited for."""
        if self._thread is not None and not self._thread.is_alive() and self._saved is not None:
            self._thread = None
        if self._thread is not None:  # at work, or `wait` has an error to raise
            return None
        saved, self._saved = self._saved, None
        return saved

    def stands_still(self) -> str | None:
        """Once for each checkpoint: that its disk takes nothing, while training goes on."""
        still = time.monotonic() - self._moved
        if self._thread is None or not self._thread.is_alive() or self._warned or still < min(WARN, self._patience):
            return None
        self._warned = True
        return (
            f"{self._checkpoints}: the disk has taken nothing of a checkpoint for {still:.0f} seconds. Training "
            f"continues; the next checkpoint waits for it, and ends the run after {self._patience:g} seconds of that."
        )

    def wait(self, at_most: float = float("inf")) -> None:
        """Until nothing is being written. Every rank calls it.

        Args:
            at_most: seconds.

        Raises:
            StorageError: the disk has refused the checkpoint; nothing of it is visible, and earlier ones are untouched.
            UnstableRun: weights or moments in it were not finite.
            RunError: another rank was lost meanwhile.
        """
        began = time.monotonic()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(min(_LOOK_SECONDS, at_most))
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
        """Before a run ends with an error: let the checkpoint be completed that is being written, and raise nothing."""
        with errors_to(warn, RunError):
            self.wait(at_most)

    def _tell(self) -> None:
        self._moved = time.monotonic()

    def _run(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        try:
            written = self._write(snapshot) if self._rank == 0 else self._write_share(snapshot)
            self._saved = Saved(snapshot.step, written, time.monotonic() - began)
        except BaseException as error:  # whatever ends this thread (a panic of Rust's is no Exception) is told
            what = f"{folder_of(self._checkpoints, snapshot.step)}: writing it failed with {type(error).__name__}"
            self._error = error if isinstance(error, RunError) else RunError(f"{what}: {error}")
        if self._error is not None:
            self._failed()

    def _write(self, snapshot: Snapshot) -> int:
        """On rank 0: the folder, its own share, and the end."""
        final = folder_of(self._checkpoints, snapshot.step)
        staging: Path | None = None
        try:
            with refusals_told(final):
                self._forget(self._number - 2)
                snapshot.copied()
                staging = begin(final, snapshot.total_bytes)
                self._post("begun", {"staging": staging.name})
                began = time.monotonic()
                assert snapshot.share is not None
                parts = [write_part(staging, snapshot.share, self._tell)]
                parts += self._others(final, self._patience + 2 * (time.monotonic() - began))
                _refuse_not_finite(snapshot.step, parts)
                with suppress(FileNotFoundError):  # of a run that has recorded nothing yet
                    sync(self._checkpoints.parent / METRICS)  # whose steps the checkpoint skips when it is resumed from
                written = finish(
                    *(staging, final, parts),
                    state=snapshot.state,
                    config_yaml=snapshot.config_yaml,
                    phase_end=snapshot.phase_end,
                    milestone=snapshot.milestone,
                )
                self._tell()
        except BaseException as error:  # the other ranks wait for a word, whatever it was
            self._post_error("begun" if staging is None else "end", error)
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        self._post("end", {})  # it is whole now, whatever becomes of the older ones
        left = f"{final} is written; those that checkpoint.keep={self._keep} no longer keeps could not be removed"
        with errors_to(warn, StorageError), os_errors_as(StorageError, left, "The next checkpoint tries again."):
            clean(self._checkpoints, self._keep)
        return written

    def _others(self, final: Path, seconds: float) -> list[Part]:
        """What the other ranks have written."""
        ranks = [rank for rank in self._writers if rank != 0]
        if self._mailbox is None or not ranks:
            return []
        try:
            answers = self._mailbox.collect([self._key(f"part/{rank}") for rank in ranks], seconds, self._tell)
        except TimeoutError as error:
            late = ", ".join(key.rpartition("/")[2] for key in error.args[0])
            raise StorageError(
                f"{final}: cannot write the checkpoint: of rank {late} nothing has come for {seconds:.0f} seconds. "
                "Earlier checkpoints are untouched; look at its disk and run the same command again."
            ) from None
        return [as_type(Part, _checked(answer)) for answer in answers]

    def _write_share(self, snapshot: Snapshot) -> int:
        """On the other ranks: their own share; then they hear what became of it."""
        assert self._mailbox is not None
        final, began = folder_of(self._checkpoints, snapshot.step), time.monotonic()
        answer = self._hear("begun", 2 * self._patience)
        try:
            if snapshot.share is not None:
                snapshot.copied()
                with refusals_told(final):
                    part = write_part(self._checkpoints / answer["staging"], snapshot.share, self._tell)
                self._post(f"part/{self._rank}", asdict(part))
        except BaseException as error:  # as above; rank 0 hands it back with its own "end"
            self._post_error(f"part/{self._rank}", error)
        self._hear("end", 2 * self._patience + 4 * (time.monotonic() - began))
        return 0

    def _hear(self, what: str, seconds: float) -> dict[str, Any]:
        """What rank 0 says; raises its error."""
        assert self._mailbox is not None
        try:
            (answer,) = self._mailbox.collect([self._key(what)], seconds, self._tell)
        except TimeoutError:
            raise RunError(f"rank 0 has not told for {seconds:.0f} seconds whether a checkpoint is written") from None
        return _checked(answer)

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _post(self, what: str, message: dict[str, Any]) -> None:
        if self._mailbox is not None:
            self._mailbox.post(self._key(what), message)

    def _post_error(self, what: str, error: BaseException) -> None:
        kind = type(error).__name__ if isinstance(error, RunError) else RunError.__name__
        text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        self._post(what, {"error": text, "kind": kind})

    def _forget(self, number: int) -> None:
        """What was said of a checkpoint before the last one: everybody has read it."""
        if self._mailbox is not None and number > 0:
            self._mailbox.forget(
                [f"{number}/{what}" for what in ("begun", "end", *(f"part/{rank}" for rank in self._writers[1:]))]
            )


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """A message; if it is an error, that is raised."""
    if "error" in answer:
        raise _KINDS.get(answer["kind"], RunError)(answer["error"])
    return answer


def _refuse_not_finite(step: int, parts: Sequence[Part]) -> None:
    if damaged := list(dict.fromkeys(name for part in parts for name in part.not_finite)):
        raise UnstableRun(
            f"step {step}: {len(damaged)} weights or moments are not finite, {damaged[0]} first, so no checkpoint is "
            "written; those there are untouched and the same command resumes from them. Lower optim.lr if this comes "
            "again."
        )
