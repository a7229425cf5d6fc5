"""Which rank hangs: each writes where it stands into the store that the ranks met in, and looks at the others.

Two things are told apart. A rank that is silent has a frozen process or a lost machine; each rank listens to the next
one only, so that a thousand ranks ask no more of the store than two. A rank that is alive and behind keeps the others
waiting; who has stood still for too long looks for whoever has come less far. The clock is the monotonic one, which
stands still while a machine sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

BEATS_FOLDER = "MODERNBERT_TRAIN_BEATS"  # the launcher's: a file for each rank, touched with every beat
GRACE_SECONDS = 15.0  # a collective waits so much longer than a hang takes to be found, so that it gets its name

_KEY = "modernbert-train/beat"
_place = (0, "the start")  # replaced as a whole, by the training thread alone


def passed(place: str) -> None:
    """Note that this rank has come to a place; all ranks come by the same places in the same order."""
    global _place
    _place = (_place[0] + 1, place)


class Beat(NamedTuple):
    """What a rank has written last: how often it has written, how many places it has passed, the last one, its host."""

    number: int
    places: int
    place: str
    host: str


class Verdict(NamedTuple):
    rank: int
    host: str
    text: str


class Heartbeat:
    """This rank's sign of life, and its view of the others.

    Args:
        store: torch's, a connection that no collective waits on.
        timeout_seconds: after so long a rank that is silent or behind counts as hung.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_seconds: float) -> None:
        self._store = store
        self._rank, self._num_ranks = rank, num_ranks
        self._timeout = timeout_seconds
        self._number = 0
        self._heard: tuple[Beat | None, float] = (None, time.monotonic())
        self._stood = (_place, time.monotonic())
        folder = os.environ.get(BEATS_FOLDER)
        self._file = None if folder is None else Path(folder, str(rank))
        if self._file is not None:
            self._file.write_text(str(os.getpid()), encoding="utf-8")
        self.beat()

    def beat(self) -> None:
        """Write."""
        self._number += 1
        self._store.set(f"{_KEY}/{self._rank}", json.dumps([self._number, *_place, socket.gethostname()]))
        if self._file is not None and self._file.exists():
            os.utime(self._file)

    def verdict(self) -> Verdict | None:
        """The rank that hangs, once it has for the whole timeout."""
        now, after = time.monotonic(), (self._rank + 1) % self._num_ranks
        beat = self._read([after])[0]
        if beat != self._heard[0]:
            self._heard = (beat, now)
        elif now - self._heard[1] > self._timeout:
            return Verdict(after, "an unknown host" if beat is None else beat.host, self._silence())
        if _place != self._stood[0]:
            self._stood = (_place, now)
        elif now - self._stood[1] > self._timeout:
            return self.behind()
        return None

    def behind(self) -> Verdict | None:
        """The rank that has come less far than this one, the last of them if there are several."""
        beats = self._read(list(range(self._num_ranks)))
        places, rank = min((beat.places, rank) for rank, beat in enumerate(beats) if beat is not None)
        beat = beats[rank]
        if beat is None or places >= _place[0]:
            return None
        return Verdict(
            rank,
            beat.host,
            f"hangs: it has not come beyond {beat.place!r}, and the others have waited for it at {_place[1]!r} for "
            f"distributed.timeout_seconds={self._timeout:g}. Its stack stands in its own output. Start again, without "
            "that machine if it comes again; if it was only slow, raise the time.",
        )

    def silent(self, seconds: float) -> Verdict | None:
        """Listen for some seconds; the first rank that wrote nothing. Some other thread must go on with `beat`."""
        ranks = list(range(self._num_ranks))
        before = self._read(ranks)
        time.sleep(seconds)
        for rank, (then, now) in enumerate(zip(before, self._read(ranks), strict=True)):
            if rank != self._rank and then == now:
                host = "an unknown host" if now is None else now.host
                return Verdict(rank, host, "is gone: its process was killed, or its machine or network is lost.")
        return None

    def _silence(self) -> str:
        return (
            f"hangs: no sign of life for distributed.timeout_seconds={self._timeout:g}. Its process is frozen, or its "
            "machine or network is lost. Start again, without that machine if it comes again."
        )

    def _read(self, ranks: list[int]) -> list[Beat | None]:
        keys = [f"{_KEY}/{rank}" for rank in ranks]
        if self._store.check(keys):
            return [Beat(*json.loads(text)) for text in self._store.multi_get(keys)]
        # only until all have written: asking for a key that is not there waits for it
        return [Beat(*json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]
