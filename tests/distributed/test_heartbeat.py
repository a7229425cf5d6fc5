"""The rank that is named after a hang. A wrong name sends someone to the wrong machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

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


def test_a_rank_that_lives_but_stands_behind_is_named(ranks: list[Rank], clock: Clock) -> None:
    """It hangs in its data, its disk or an endless loop, and the others in the collective that it does not reach."""
    for rank in ranks:
        rank.act("before_forward of step 7")
    for rank in (ranks[0], ranks[2]):
        rank.act("before_backward of step 7")
    clock.now += 40
    assert [rank.act() for rank in ranks] == [None] * 3
    clock.now += 21
    verdicts = [rank.act() for rank in ranks]
    assert verdicts[1] is None  # no rank is behind it
    for verdict in (verdicts[0], verdicts[2]):
        assert verdict is not None and verdict.rank == 1
        assert "'before_forward of step 7'" in verdict.text and "'before_backward of step 7'" in verdict.text


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


def a_minute_later(ranks: list[Rank], clock: Clock) -> list[heartbeat.Verdict | None]:
    """Return the verdict of each when all have lived on without moving."""
    clock.now += 61
    for rank in ranks:
        rank.beat()
    return [rank.act() for rank in ranks]


def gpus(ranks: list[Rank], clock: Clock, places: list[str], *counts: tuple[int, int, int]) -> list[heartbeat.Verdict]:
    """Return the verdicts of the ranks after their GPUs have been in this state for a minute."""
    for seconds in (61, 0):
        for rank, place, count in zip(ranks, places, counts, strict=True):
            rank.gpu = count
            rank.act(place if rank.activity[1] != place else None)
        clock.now += seconds
    return [verdict for verdict in a_minute_later(ranks, clock) if verdict is not None]


@pytest.mark.parametrize(
    ("count", "num_ranks", "place"),
    [
        pytest.param((9, 7, 7), 2, "its GPU has started 7 collectives", id="a GPU before a collective"),
        pytest.param((9, 7, 6), 3, "its GPU has started 7 collectives", id="a GPU in a collective"),
        pytest.param((8, 8, 8), 2, "it has not come beyond 'sums'", id="a host in the call of a collective"),
    ],
)
def test_where_all_hosts_stand_alike_the_one_whose_gpu_is_behind_is_named(
    ranks: list[Rank], clock: Clock, count: tuple[int, int, int], num_ranks: int, place: str
) -> None:
    """NCCL raises nothing: the hosts wait at the same place for ever. A rank does not see the end of a collective that
    has ended for the others; the first rank to look decides for all."""
    others = (9, 9, 8) if count == (8, 8, 8) else (9, 8, 7)
    found = gpus(ranks, clock, ["sums"] * 3, others, count, others)
    assert {verdict.rank for verdict in found} == {1} and len(found) == num_ranks
    assert all(place in verdict.text and verdict.blames for verdict in found)


def test_gpus_that_have_all_come_blame_the_network_and_no_machine(ranks: list[Rank], clock: Clock) -> None:
    found = gpus(ranks, clock, ["sums"] * 3, (9, 8, 7), (9, 8, 7), (9, 8, 7))
    assert found and all("no rank is behind" in verdict.text and not verdict.blames for verdict in found)


def test_gpus_in_no_collective_are_left_alone(ranks: list[Rank], clock: Clock) -> None:
    """A validation of an hour: each GPU computes, without waiting for another."""
    assert gpus(ranks, clock, ["validation"] * 3, (9, 9, 9), (9, 9, 9), (9, 9, 9)) == []


def test_a_host_that_gives_its_gpu_nothing_is_named_by_its_place(ranks: list[Rank], clock: Clock) -> None:
    """Its GPU is behind too, and healthy: it has done all its work. A stack trace helps here."""
    for rank, count in zip(ranks, [(9, 9, 8), (8, 8, 8), (9, 9, 8)], strict=True):
        rank.gpu = count
        rank.act("batch")
    for rank in (ranks[0], ranks[2]):
        rank.act("later")
    verdict = a_minute_later(ranks, clock)[0]
    assert verdict is not None and verdict.rank == 1 and "it has not come beyond 'batch'" in verdict.text


def test_a_gpu_that_hangs_with_a_full_queue_is_named_and_not_its_host(ranks: list[Rank], clock: Clock) -> None:
    """Its host can give it no more work, so the host is behind as well."""
    for rank in ranks:
        rank.gpu = (9, 7, 7) if rank is ranks[1] else (9, 8, 7)
        rank.act("before_forward of step 7")
    for rank in (ranks[0], ranks[2]):
        rank.act("sums")
    verdict = a_minute_later(ranks, clock)[2]
    assert verdict is not None and verdict.rank == 1 and "its GPU has started 7 collectives" in verdict.text


def test_nccl_that_does_not_connect_ends_with_what_to_look_at(ranks: list[Rank], clock: Clock) -> None:
    """A firewall between two machines: ncclCommInitRank waits without a limit, and prints nothing."""
    for rank in ranks:
        rank.act(heartbeat.CONNECTING)
    verdict = a_minute_later(ranks, clock)[0]
    assert verdict is not None and not verdict.blames
    assert "NCCL does not connect" in verdict.text and "NCCL_SOCKET_IFNAME" in verdict.text


def test_a_rank_that_does_not_come_to_the_connection_is_named(ranks: list[Rank], clock: Clock) -> None:
    for rank in (ranks[0], ranks[2]):
        rank.act(heartbeat.CONNECTING)
    verdict = a_minute_later(ranks, clock)[0]
    assert verdict is not None and verdict.rank == 1 and "beyond 'the start'" in verdict.text


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
