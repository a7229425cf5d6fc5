"""Which rank hangs: each writes where it stands into the store that the ranks met in, and looks at the others.

Three things are told apart. A rank that is silent has a frozen process or a lost machine; each rank listens to the next
one only, so that a thousand ranks ask no more of the store than two. A rank that is alive and behind keeps the others
waiting; who has stood still for too long looks for whoever has come less far. And where all hosts have come equally
far, a GPU may not have: NCCL raises nothing, so each rank also tells how many collectives its GPU has come to. The
clock is the monotonic one, which stands still while a machine sleeps.
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

SILENCE_SECONDS = 60.0  # a rank writes twice a second from a thread of its own, whatever a step takes
SILENT_SECONDS = 4.0  # a rank silent for so long after a broken connection is the one that broke it
GRACE_SECONDS = 15.0  # a collective waits so much longer than a hang takes to be found, so that it gets its name

NETWORK = (
    "Of NCCL, NCCL_DEBUG=INFO prints which address it took; NCCL_SOCKET_IFNAME names the network to take "
    "(launch.env.NCCL_SOCKET_IFNAME)."
)
_KEY = "modernbert-train/beat"
_LISTEN_SECONDS = 0.5  # so often a rank writes, and whoever listens looks
CONNECTING = "the connection of all GPUs"  # NCCL waits in it for ever
_place = (0, "the start")  # replaced as a whole, by the training thread alone
_patience = 0.0


def passed(place: str) -> None:
    """Note that this rank has come to a place: all ranks come by the same places in the same order.

    The places are the events of a step, and each call in which the host waits for the other ranks: with NCCL it stays
    there without an error, and a rank that does not come has passed fewer.
    """
    global _place
    _place = (_place[0] + 1, place)


def allow(seconds: float) -> None:
    """From here on a rank may keep the others waiting for so long, where that is longer than their timeout."""
    global _patience
    _patience = seconds


def silence_limit(timeout_seconds: float) -> float:
    """How long a rank may be silent: not as long as a collective may take, since its beat does not wait for one."""
    return min(SILENCE_SECONDS, timeout_seconds)


class Beat(NamedTuple):
    """What a rank has written last.

    Attributes:
        number: how often it has written.
        places, place: how many places it has passed, and the last one.
        host: the name of its machine.
        processes: its machine's table of processes; None if it cannot be told.
        pid: its process there.
        left: it has left in order, and will write no more.
        collectives: those that its host has given to its GPU, that the GPU has come to, and that have ended.
    """

    number: int
    places: int
    place: str
    host: str
    processes: str | None
    pid: int
    left: bool
    collectives: Sequence[int] | None


class Verdict(NamedTuple):
    """Attributes: the rank, its machine and what is said of it; whether the fault may be that machine's."""

    rank: int
    host: str
    text: str
    blames: bool = True


class Heartbeat:
    """This rank's sign of life, and its view of the others.

    Args:
        store: torch's, a connection that no collective waits on.
        timeout_seconds: after so long a rank that is behind, or never came, counts as hung.
        collectives: of this rank's GPU, see `Beat`; None where there are none.
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
        self._stood: tuple[Any, float] = ((_place, self._collectives), time.monotonic())
        folder = os.environ.get(BEATS_FOLDER)
        self._file = None if folder is None else Path(folder, str(rank))
        if self._file is not None:
            self._file.write_text(str(os.getpid()), encoding="utf-8")
        self.beat()

    def beat(self, *, left: bool = False) -> None:
        """Write; `left` for the last time, in order."""
        self._number += 1
        self._collectives = self._ask_collectives()
        host, pid = socket.gethostname(), os.getpid()
        beat = Beat(self._number, *_place, host, self._processes, pid, left, self._collectives)
        self._store.set(f"{_KEY}/{self._rank}", json.dumps(beat))

    def close(self) -> None:
        """Tell this machine's launcher that no further sign of life is to be expected."""
        if self._file is not None and self._file.exists():
            self._file.write_text(f"{os.getpid()} {LEFT}", encoding="utf-8")

    def touch(self) -> None:
        """A sign of life for this machine's launcher, whether or not the store answers."""
        if self._file is not None and self._file.exists():
            os.utime(self._file)

    def verdict(self) -> Verdict | None:
        """The rank that is gone; or the one that hangs, once it has for the whole timeout."""
        now, after = time.monotonic(), (self._rank + 1) % self._num_ranks
        beat = self._read([after])[0]
        if self._has_ended(beat):
            return self._gone(after, beat)
        if beat != self._heard[0]:
            self._heard = (beat, now)
        elif not (beat and beat.left) and now - self._heard[1] > (self._silence if beat else self._timeout):
            return Verdict(after, _host(beat), self._silent_text() if beat else self._absence())
        here = (_place, self._collectives)
        if here != self._stood[0]:
            self._stood = (here, now)
        elif now - self._stood[1] > self._timeout:
            return self._who_holds_up(now - self._stood[1])
        return None

    def _who_holds_up(self, seconds: float) -> Verdict | None:
        """The rank for which this one has stood still for so long, if it is one that it stands still."""
        found = self.behind()
        if found is not None and seconds <= _patience:
            return None
        found = self._stuck_gpu(found) or found
        if found is None:
            return self._not_connected() if _place[1] == CONNECTING else None
        # a rank that waits for a silent one stands as far behind as that one
        silent = self._silent_rank(SILENT_SECONDS)
        if silent is None:
            return found
        rank, beat = silent
        return self._gone(rank, beat) if self._has_ended(beat) else Verdict(rank, _host(beat), self._silent_text())

    def behind(self) -> Verdict | None:
        """The rank that has come less far than this one, the last of them if there are several."""
        beats = self._read(list(range(self._num_ranks)))
        here = [(beat.places, rank, beat) for rank, beat in enumerate(beats) if beat is not None and not beat.left]
        places, rank, beat = min(here)
        if places >= _place[0]:
            return None
        return Verdict(
            rank,
            beat.host,
            f"hangs: it has not come beyond {beat.place!r}, and the others have waited for it at {_place[1]!r} for "
            f"distributed.timeout_seconds={self._timeout:g}. Its stack is in its own output. Start again, without "
            "that machine if it comes again; if it was only slow, raise the time.",
        )

    def _stuck_gpu(self, behind: Verdict | None) -> Verdict | None:
        """Whose GPU has not come to the collective in which this rank's GPU has stood for the whole timeout.

        On a healthy GPU the collectives wait for nothing but each other and this rank's own work, so the one that
        hangs has come to the fewest. That may be this rank's: the others have come to a later one, so the one that it
        stands in has ended for them. None if this rank's GPU is in no collective: then it computes, or it hangs itself;
        and if a rank is behind whose host has given its GPU no collective that it has not come to.
        """
        if self._collectives is None or self._collectives[1] <= self._collectives[2]:
            return None
        beats = self._read(list(range(self._num_ranks)))
        come = {rank: beat.collectives for rank, beat in enumerate(beats) if beat and beat.collectives}
        rank = min(come, key=lambda each: come[each][1])
        given, fewest, _ = come[rank]
        if behind is not None and (rank != behind.rank or given == fewest):
            return None
        waited = f"for distributed.timeout_seconds={self._timeout:g}"
        if fewest == max(begun for _, begun, _ in come.values()):
            text = f"a collective waited {waited}, and no rank is behind the others, nor its GPU. {NETWORK}"
            return Verdict(self._rank, socket.gethostname(), text, blames=False)
        others = sum(begun == fewest for _, begun, _ in come.values()) - 1
        beat = beats[rank]
        assert beat is not None
        return Verdict(
            rank,
            beat.host,
            f"hangs: its GPU has started {fewest} collectives, and the GPUs of other ranks have waited in a later one "
            f"{waited}, while its host has gone on to {beat.place!r}."
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
        """Listen to all for some seconds, and go on to write; the first rank that has ended or wrote nothing."""
        found = self._silent_rank(seconds)
        return found and self._gone(*found)

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
        """Rank 0, if its process is known to have ended; asks the system and not the store, which it may have held."""
        return self._gone(0, self._last_of_first) if self._has_ended(self._last_of_first) else None

    def first_host(self) -> str | None:
        """The machine of rank 0; None if it has never been heard of."""
        return None if self._last_of_first is None else self._last_of_first.host

    def _has_ended(self, beat: Beat | None) -> bool:
        """Whether a rank of this machine has no process any more, and did not leave in order."""
        if beat is None or beat.left or beat.processes is None or beat.processes != self._processes:
            return False
        return not is_running(beat.pid)

    def _gone(self, rank: int, beat: Beat | None) -> Verdict:
        if self._has_ended(beat):
            text = "is gone: its process has ended without a word. If it was killed, `dmesg` there may tell why."
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
        found = self._read_all(list(dict.fromkeys([0, *ranks])) if self._last_of_first is None else ranks)
        self._last_of_first = found.get(0) or self._last_of_first
        return [found[rank] for rank in ranks]

    def _read_all(self, ranks: list[int]) -> dict[int, Beat | None]:
        keys = [f"{_KEY}/{rank}" for rank in ranks]
        if self._store.check(keys):
            texts = self._store.multi_get(keys)
            return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        # only until all have written: asking for a key that is not there waits for it
        return {
            rank: Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None
            for rank, key in zip(ranks, keys, strict=True)
        }


def last_beats(store: Any, num_ranks: int) -> list[Beat | None]:
    """Return what each rank has written last; None for one that has not come."""
    keys = [f"{_KEY}/{rank}" for rank in range(num_ranks)]
    return [Beat(*json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def _host(beat: Beat | None) -> str:
    return "an unknown host" if beat is None else beat.host


def table_of_processes() -> str | None:
    """What two processes have in common if one can ask the system for the other by its number; None if none can."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return None


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and waits for its parent to notice does not run."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    return False
