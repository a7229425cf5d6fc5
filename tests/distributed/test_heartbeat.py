"""The rank that is named after a hang. A wrong name sends someone to the wrong machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from modernbert_train.distributed import heartbeat
from modernbert_train.distributed.heartbeat import Heartbeat, is_running, post_heartbeat
from modernbert_train.distributed.launched import BEATS_FOLDER


class Rank(Heartbeat):
    """A rank of several in one process: its activity, a global of the module, is set while it acts."""

    def __init__(self, store: HashStore, rank: int, clock: Clock, timeout: float | None = None) -> None:
        self.activity = (0, "the start")
        self.gpu: tuple[int, int, int] | None = None
        super().__init__(store, rank, 3, 60 if timeout is None else timeout, lambda: self.gpu)
        self.clock = clock

    def beat(self, *, left: bool = False) -> None:
        heartbeat._activity = self.activity
        super().beat(left=left)

    def act(self, activity: str | None = None) -> heartbeat.Verdict | None:
        heartbeat._activity = self.activity
        if activity is not None:
            post_heartbeat(activity)
            self.activity = heartbeat._activity
        self.beat()
        return self.verdict()


class Clock:
    """Attributes: now; the ranks that write while one sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.alive: list[Rank] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        here = heartbeat._activity
        for rank in self.alive:
            rank.beat()
        heartbeat._activity = here


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(heartbeat.time, "sleep", clock.sleep)
    monkeypatch.setattr(heartbeat, "_activity", (0, "the start"))
    monkeypatch.setattr(heartbeat, "_patience", 0.0)
    return clock


@pytest.fixture
def ranks(clock: Clock) -> list[Rank]:
    store = HashStore()
    clock.alive = [Rank(store, number, clock) for number in range(3)]
    return list(clock.alive)


def test_ranks_that_move_or_rest_together_are_left_alone(ranks: list[Rank], clock: Clock) -> None:
    """A long validation or save is no hang: all ranks are at the same place."""
    for number in range(5):
        clock.now += 50
        assert [rank.act(f"step {number}") for rank in ranks] == [None] * 3
    for _ in range(5):
        clock.now += 50
        assert [rank.act() for rank in ranks] == [None] * 3


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_every_rank_is_listened_to(ranks: list[Rank], clock: Clock, silent: int) -> None:
    """The first one too, by the last: a frozen rank without a listener costs the whole job's time."""
    others = [rank for number, rank in enumerate(ranks) if number != silent]
    for step in range(2):
        clock.now += 50
        assert [rank.act(f"step {step}") for rank in others] == [None, None]
    clock.now += 11
    (verdict,) = [verdict for rank in others if (verdict := rank.act("step 2")) is not None]
    assert verdict.rank == silent and "no sign of life" in verdict.text


def test_a_rank_a_moment_behind_is_waited_for_however_long_the_run_has_been(ranks: list[Rank], clock: Clock) -> None:
    """The time since this rank's last step counts, not since its first: else a healthy run of hours would end at the
    first late batch."""
    for number in range(5):
        clock.now += 50
        assert [rank.act(f"step {number}") for rank in ranks] == [None] * 3
    for rank in (ranks[0], ranks[2]):
        rank.act("step 5")
    clock.now += 1
    assert [rank.act() for rank in ranks] == [None] * 3


def test_after_a_broken_connection_the_rank_that_wrote_nothing_is_named(ranks: list[Rank], clock: Clock) -> None:
    clock.alive = [ranks[1]]  # the one that listens writes itself, or it would be taken for dead by the others
    verdict = ranks[0].silent(4.0)
    assert verdict is not None and verdict.rank == 2 and "is gone" in verdict.text


def test_the_dead_rank_is_named_and_not_the_one_that_waits_for_it(ranks: list[Rank], clock: Clock) -> None:
    """Rank 1 was killed on another machine at a place that rank 0 has reached too, where it waits for rank 1."""
    for rank in ranks:
        rank.act("a")
    ranks[2].act("b")
    clock.alive = [ranks[0], ranks[2]]
    verdict = None
    while verdict is None:
        clock.now += 10
        ranks[0].beat()
        verdict = ranks[2].act()  # it listens to rank 0, which lives
    assert verdict.rank == 1 and verdict.text.startswith("hangs: no sign of life")


@pytest.mark.runs
def test_a_process_that_has_ended_is_found_at_once_on_its_own_machine(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the others save, read or start: no connection breaks, and the timeout may be an hour."""
    ended = subprocess.Popen(["true"])
    while is_running(ended.pid):  # it stays in the table of processes, as a rank does until its launcher looks
        pass
    with monkeypatch.context() as there:
        there.setattr(heartbeat.os, "getpid", lambda: ended.pid)
        ranks[1].beat()
    verdict = ranks[0].act()
    assert verdict is not None and verdict.rank == 1 and verdict.text.startswith("is gone: its process ended")
    assert ranks[2].act() is None
    with monkeypatch.context() as there:  # a container's process of the same number is another one
        there.setattr(heartbeat.os, "getpid", lambda: ended.pid)
        ranks[1]._processes = "another machine"
        ranks[1].beat()
    assert ranks[0].act() is None
    ended.wait()


def test_a_rank_that_left_in_order_is_not_missed(ranks: list[Rank], clock: Clock) -> None:
    """At the end of a run one rank may be faster by any time, or the slower ones would end it as failed."""
    ranks[1].beat(left=True)
    for _ in range(5):
        clock.now += 50
        assert [ranks[0].act(), ranks[2].act()] == [None, None]


def test_silence_has_a_limit_of_its_own(clock: Clock) -> None:
    """A lost machine is named within a minute, however long a slow step or a rank that starts late may take."""
    store = HashStore()
    first, second = Rank(store, 0, clock, timeout=300), Rank(store, 1, clock, timeout=300)
    assert second.act("a") is None and first.act("a") is None
    clock.now += 61
    verdict = first.act("b")
    assert verdict is not None and verdict.rank == 1 and verdict.text.startswith("hangs: no sign of life for 60 s")
    second._num_ranks = 3  # the next one is rank 2, which has not come yet
    clock.now += 230
    assert second.act("b") is None
    clock.now += 10
    verdict = second.act("c")
    assert verdict is not None and verdict.rank == 2 and "never came" in verdict.text


STARTED = "its GPU has started 7 collectives of 9 that its host enqueued"
WAITED = "beyond 'step 7', and the others have waited for it at 'sums'"
ALL, OTHERS = [0, 1, 2], [0, 2]


@pytest.mark.parametrize(
    ("place", "later", "others", "second", "speakers", "text"),
    [
        # rank 1 is named; a rank does not see the end of a collective that has ended for the others
        pytest.param("sums", None, (9, 8, 7), (9, 7, 7), OTHERS, STARTED, id="a GPU before a collective"),
        pytest.param("sums", None, (9, 8, 7), (9, 7, 6), ALL, STARTED, id="a GPU in a collective"),
        pytest.param("sums", None, (9, 9, 8), (8, 8, 8), OTHERS, "beyond 'sums'", id="a host in a call"),
        pytest.param("batch", "sums", (9, 8, 7), (9, 7, 7), OTHERS, STARTED, id="a GPU with a full queue"),
        pytest.param("batch", "sums", (9, 9, 8), (8, 8, 8), OTHERS, "beyond 'batch'", id="a host before its GPU"),
        pytest.param(None, heartbeat.CONNECTING, None, None, OTHERS, "beyond 'the start'", id="it never connects"),
        pytest.param("step 7", "sums", None, None, OTHERS, WAITED, id="a host alone"),
        # no machine is blamed
        pytest.param("sums", None, (9, 8, 7), (9, 8, 7), ALL, "no rank is behind", id="the network of all GPUs"),
        pytest.param(heartbeat.CONNECTING, None, None, None, ALL, "NCCL does not connect", id="a firewall"),
        pytest.param("validation", None, (9, 9, 9), (9, 9, 9), [], "", id="each GPU computes for an hour"),
    ],
)
def test_where_hosts_or_gpus_wait_without_an_error_the_one_behind_is_named(
    ranks: list[Rank],
    clock: Clock,
    place: str | None,
    later: str | None,
    others: Any,
    second: Any,
    speakers: list[int],
    text: str,
) -> None:
    """A rank hangs in its data, its disk or a loop. NCCL raises nothing; the first rank to look decides for all."""
    for rank, count in zip(ranks, (others, second, others), strict=True):
        rank.gpu = count
        rank.act(place)
    for rank in (ranks[0], ranks[2]):
        rank.act(later)
    for seconds in (40, 21):
        clock.now += seconds
        for rank in ranks:
            rank.beat()
        verdicts = {number: verdict for number, rank in enumerate(ranks) if (verdict := rank.act()) is not None}
        assert list(verdicts) == speakers * (seconds == 21)
    blames = len(speakers) == 2 or text == STARTED
    for number, verdict in verdicts.items():
        assert text in verdict.text and ("NCCL_SOCKET_IFNAME" in verdict.text) != blames
        assert (verdict.rank, verdict.blames) == (1 if blames else number, blames)


def test_a_first_step_may_take_longer_than_the_timeout(ranks: list[Rank], clock: Clock) -> None:
    """One machine's cache is cold: it compiles for minutes while the others wait, and the run is healthy."""
    heartbeat.set_timeout(300.0)
    for rank in ranks:
        rank.act("batch")
    for rank in (ranks[0], ranks[2]):
        rank.act("sums")
    for _ in range(4):
        clock.now += 60
        for rank in ranks:
            rank.beat()
        assert [rank.act() for rank in ranks] == [None] * 3
    heartbeat.set_timeout(0.0)
    verdict = ranks[0].act()
    assert verdict is not None and verdict.rank == 1


def test_a_rank_alone_with_a_launcher_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEATS_FOLDER, str(tmp_path))
    rank = Heartbeat(HashStore(), 5, 8, timeout_seconds=60)
    file = tmp_path / "5"
    before = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == before:  # the clock of the file system is coarse
        rank.touch()
    assert int(file.read_text()) > 1
