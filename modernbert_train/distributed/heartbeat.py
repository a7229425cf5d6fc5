"""Find the hanging rank: every rank posts its progress to the rendezvous store and watches the next rank's.

There are three cases. A silent rank has a frozen process or a lost machine; each rank listens to the next one only, so
a thousand ranks query the store no more often than two. A rank that is alive and behind keeps the others waiting; a
rank that has waited for the whole timeout looks for the one with the least progress. If all hosts have equal progress,
a GPU may be stuck: NCCL raises nothing, so each rank also posts the number of collectives its GPU has reached. Time is
monotonic and stops while a machine sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.distributed.launched import BEATS_FOLDER, LEFT

SILENCE_SECONDS = 60.0  # a rank's thread writes twice a second, however long a step takes
SILENT_SECONDS = 4.0  # after a broken connection, a rank silent for this long is the one that broke it
GRACE_SECONDS = 15.0  # extra timeout of collectives, so that a hang is found and named before they raise

NETWORK = (
    "With NCCL_DEBUG=INFO, NCCL prints the address it uses; NCCL_SOCKET_IFNAME chooses the network interface "
    "(launch.env.NCCL_SOCKET_IFNAME)."
)
_KEY = "modernbert-train/beat"
_LISTEN_SECONDS = 0.5  # interval of writing and of listening
CONNECTING = "the connection of all GPUs"  # NCCL waits in it without a timeout
_activity = (0, "the start")  # replaced as a whole, by the training thread only
_patience = 0.0


def post_heartbeat(activity: str) -> None:
    """Record that this rank begins an activity; all ranks have the same activities in the same order.

    Activities are the events of a step, and each call in which the host waits for other ranks. With NCCL the host would
    wait there without an error; the hanging rank is the one that has begun the fewest.
    """
    global _activity
    _activity = (_activity[0] + 1, activity)


def set_timeout(seconds: float) -> None:
    """Set how long a rank may keep the others waiting from now on, if that is longer than their timeout."""
    global _patience
    _patience = seconds


def silence_limit(timeout_seconds: float) -> float:
    """Return how long a rank may be silent: less than a collective's timeout, since heartbeats never wait for one."""
    return min(SILENCE_SECONDS, timeout_seconds)


class Beat(NamedTuple):
    """The last message of a rank.

    Attributes:
        number: count of its messages.
        activities, activity: number of activities begun, and the last one.
        host: the name of its machine.
        processes: identifies its machine's process table; None if unknown.
        pid: its process there.
        left: it has left in order, and will not write again.
        collectives: number that its host has enqueued, that its GPU has started, and that have finished.
    """

    number: int
    activities: int
    activity: str
    host: str
    processes: str | None
    pid: int
    left: bool
    collectives: Sequence[int] | None


class Verdict(NamedTuple):
    """The rank at fault: its number, its machine, the message about it, and whether the machine may be the cause."""

    rank: int
    host: str
    text: str
    blames: bool = True


class Heartbeat:
    """This rank's heartbeat, and its view of the others.

    Args:
        store: torch's, on a connection that no collective waits on.
        timeout_seconds: a rank that is behind or missing for longer counts as hung.
        collectives: returns counts of this rank's GPU, see `Beat`; None without NCCL.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        timeout_seconds: float,
        collectives: Callable[[], Sequence[int] | None] = lambda: None,
    ) -> None:
        self._store = store
        self._rank, self._num_ranks = rank, num_ranks
        self._timeout = timeout_seconds
        self._silence = silence_limit(timeout_seconds)
        self._ask_collectives = collectives
        self._number = 0
        self._processes = table_of_processes()
        self._last_of_first: Beat | None = None
        self._heard: tuple[Beat | None, float] = (None, time.monotonic())
        self._collectives: Sequence[int] | None = None
        self._stood: tuple[Any, float] = ((_activity, self._collectives), time.monotonic())
        folder = os.environ.get(BEATS_FOLDER)
        self._file = None if folder is None else Path(folder, str(rank))
        if self._file is not None:
            self._file.write_text(str(os.getpid()), encoding="utf-8")
        self.beat()

    def beat(self, *, left: bool = False) -> None:
        """Write a heartbeat; with `left` the last one, on an orderly exit."""
        self._number += 1
        self._collectives = self._ask_collectives()
        host, pid = socket.gethostname(), os.getpid()
        beat = Beat(self._number, *_activity, host, self._processes, pid, left, self._collectives)
        self._store.set(f"{_KEY}/{self._rank}", json.dumps(beat))

    def close(self) -> None:
        """Tell this machine's launcher not to expect further heartbeats."""
        if self._file is not None and self._file.exists():
            self._file.write_text(f"{os.getpid()} {LEFT}", encoding="utf-8")

    def touch(self) -> None:
        """Touch the heartbeat file for this machine's launcher, whether or not the store answers."""
        if self._file is not None and self._file.exists():
            os.utime(self._file)

    def verdict(self) -> Verdict | None:
        """Return the rank that is gone, or the one that has hung for the whole timeout."""
        now, after = time.monotonic(), (self._rank + 1) % self._num_ranks
        beat = self._read([after])[0]
        if self._has_ended(beat):
            return self._gone(after, beat)
        if beat != self._heard[0]:
            self._heard = (beat, now)
        elif not (beat and beat.left) and now - self._heard[1] > (self._silence if beat else self._timeout):
            return Verdict(after, _host(beat), self._silent_text() if beat else self._absence())
        here = (_activity, self._collectives)
        if here != self._stood[0]:
            self._stood = (here, now)
        elif now - self._stood[1] > self._timeout:
            return self._who_holds_up(now - self._stood[1])
        return None

    def _who_holds_up(self, seconds: float) -> Verdict | None:
        """Return the rank this one has been waiting for longer than the timeout, if any."""
        behind = self.behind()
        if behind is not None and seconds <= _patience:
            return None
        behind = self._stuck_gpu(behind) or behind
        if behind is None:
            return self._not_connected() if _activity[1] == CONNECTING else None
        # a rank that waits for a silent one has the same progress as that one
        silent = self._silent_rank(SILENT_SECONDS)
        if silent is None:
            return behind
        rank, beat = silent
        return self._gone(rank, beat) if self._has_ended(beat) else Verdict(rank, _host(beat), self._silent_text())

    def behind(self) -> Verdict | None:
        """Return the rank with less progress than this one, the last of them if there are several."""
        beats = self._read(list(range(self._num_ranks)))
        here = [(beat.activities, rank, beat) for rank, beat in enumerate(beats) if beat is not None and not beat.left]
        activities, rank, beat = min(here)
        if activities >= _activity[0]:
            return None
        return self._stuck_host(rank, beat)

    def _stuck_host(self, rank: int, beat: Beat) -> Verdict:
        return Verdict(
            rank,
            beat.host,
            f"hangs: it has not come beyond {beat.activity!r}, and the others have waited for it at {_activity[1]!r} "
            f"for distributed.timeout_seconds={self._timeout:g}. Its stack is in its own output. Start again, without "
            "that machine if it comes again; if it was only slow, raise the time.",
        )

    def _stuck_gpu(self, behind: Verdict | None) -> Verdict | None:
        """Return the rank whose GPU has not reached the collective in which this rank's GPU waited the whole timeout.

        On a healthy GPU collectives wait only for each other and this rank's own work, so the hanging GPU has reached
        the fewest. That may be this rank's own: if others are in a later one, the one it waits in has ended for them.
        None if this rank's GPU is in no collective, so that it computes or hangs itself; and None if a rank is behind
        whose GPU has reached every collective that its host enqueued. With no rank behind, a GPU that has finished
        all of them waits for its host, which is stuck in the call of the next one.
        """
        if self._collectives is None or self._collectives[1] <= self._collectives[2]:
            return None
        beats = self._read(list(range(self._num_ranks)))
        come = {rank: beat.collectives for rank, beat in enumerate(beats) if beat and beat.collectives}
        rank = min(come, key=lambda each: come[each][1])
        enqueued, fewest, ended = come[rank]
        if behind is not None and (rank != behind.rank or enqueued == fewest):
            return None
        waited = f"for distributed.timeout_seconds={self._timeout:g}"
        if fewest == max(begun for _, begun, _ in come.values()):
            text = f"a collective waited {waited}, and no rank is behind the others, nor its GPU. {NETWORK}"
            return Verdict(self._rank, socket.gethostname(), text, blames=False)
        others = sum(begun == fewest for _, begun, _ in come.values()) - 1
        beat = beats[rank]
        assert beat is not None
        if ended == enqueued:
            return self._stuck_host(rank, beat)
        return Verdict(
            rank,
            beat.host,
            f"hangs: its GPU has started {fewest} collectives of {enqueued} that its host enqueued, and the GPUs of "
            f"other ranks have waited in a later one {waited}, while its host has gone on to {beat.activity!r}."
            + (f" So have those of {others} ranks more." if others else "")
            + " Look there for an Xid in `dmesg`. Start again, without that machine if it comes again.",
        )

    def _not_connected(self) -> Verdict:
        text = (
            f"NCCL does not connect the GPUs: all {self._num_ranks} ranks have come, and have waited for "
            f"distributed.timeout_seconds={self._timeout:g}. A firewall between the machines, or an interface through "
            f"which they do not reach each other. {NETWORK}"
        )
        return Verdict(self._rank, socket.gethostname(), text, blames=False)

    def silent(self, seconds: float) -> Verdict | None:
        """Listen to all ranks for some seconds while writing; return the first that has ended or stayed silent."""
        silent_rank = self._silent_rank(seconds)
        return silent_rank and self._gone(*silent_rank)

    def _silent_rank(self, seconds: float) -> tuple[int, Beat | None] | None:
        ranks = list(range(self._num_ranks))
        before = self._read(ranks)
        deadline = time.monotonic() + seconds
        while True:
            now = self._read(ranks)
            for rank, beat in enumerate(now):
                if self._has_ended(beat):
                    return rank, beat
            if time.monotonic() >= deadline:
                break
            time.sleep(_LISTEN_SECONDS)
            self.beat()
        for rank, (then, beat) in enumerate(zip(before, now, strict=True)):
            if rank != self._rank and then == beat and not (beat and beat.left):
                return rank, beat
        return None

    def first_rank(self) -> Verdict | None:
        """Return rank 0 if its process has ended; asks the system, not the store, which rank 0 may have held."""
        return self._gone(0, self._last_of_first) if self._has_ended(self._last_of_first) else None

    def first_host(self) -> str | None:
        """Return the machine of rank 0; None if it never wrote."""
        return None if self._last_of_first is None else self._last_of_first.host

    def _has_ended(self, beat: Beat | None) -> bool:
        """Return True if a rank of this machine has ended without leaving in order."""
        if beat is None or beat.left or beat.processes is None or beat.processes != self._processes:
            return False
        return not is_running(beat.pid)

    def _gone(self, rank: int, beat: Beat | None) -> Verdict:
        if self._has_ended(beat):
            text = "is gone: its process ended without an error. If it was killed, `dmesg` there may tell why."
        else:
            text = "is gone: its process was killed, or its machine or network is lost."
        return Verdict(rank, _host(beat), text)

    def _absence(self) -> str:
        return (
            f"is gone or never came: no sign of life for distributed.timeout_seconds={self._timeout:g} since the "
            "start. Look at its own output."
        )

    def _silent_text(self) -> str:
        return (
            f"hangs: no sign of life for {self._silence:g} s. Its process is frozen or was killed, or its "
            "machine or network is lost. Start again, without that machine if it comes again."
        )

    def _read(self, ranks: list[int]) -> list[Beat | None]:
        beats = self._read_all(list(dict.fromkeys([0, *ranks])) if self._last_of_first is None else ranks)
        self._last_of_first = beats.get(0) or self._last_of_first
        return [beats[rank] for rank in ranks]

    def _read_all(self, ranks: list[int]) -> dict[int, Beat | None]:
        keys = [f"{_KEY}/{rank}" for rank in ranks]
        if self._store.check(keys):
            texts = self._store.multi_get(keys)
            return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        # only until all have written: reading a missing key would wait for it
        return {
            rank: Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None
            for rank, key in zip(ranks, keys, strict=True)
        }


def last_beats(store: Any, num_ranks: int) -> list[Beat | None]:
    """Return the last message of each rank; None for a rank that never wrote."""
    keys = [f"{_KEY}/{rank}" for rank in range(num_ranks)]
    return [Beat(*json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def _host(beat: Beat | None) -> str:
    return "an unknown host" if beat is None else beat.host


def table_of_processes() -> str | None:
    """Return an identifier shared by processes that can see each other's process ids; None if it is unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return None


def is_running(pid: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    return False
