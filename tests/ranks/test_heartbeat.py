"""Which rank is named when the ranks stand still. A wrong name sends someone to the wrong machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch.distributed import HashStore

from modernbert_train.ranks import heartbeat
from modernbert_train.ranks.heartbeat import Heartbeat, is_running, passed
from modernbert_train.ranks.launched import BEATS_FOLDER


class Rank(Heartbeat):
    """A rank of several in one process: its place, which is the process's own, is put there while it acts."""

    def __init__(self, store: HashStore, rank: int, clock: Clock) -> None:
        self.place = (0, "the start")
        super().__init__(store, rank, 3, timeout_seconds=60)
        self.clock = clock

    def act(self, place: str | None = None) -> heartbeat.Verdict | None:
        heartbeat._place = self.place
        if place is not None:
            passed(place)
            self.place = heartbeat._place
        self.beat()
        return self.verdict()


class Clock:
    """Attributes: now; the ranks that write while one sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.alive: list[Rank] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.alive:
            rank.beat()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(heartbeat.time, "sleep", clock.sleep)
    monkeypatch.setattr(heartbeat, "_place", (0, "the start"))
    return clock


@pytest.fixture
def ranks(clock: Clock) -> list[Rank]:
    store = HashStore()
    clock.alive = [Rank(store, number, clock) for number in range(3)]
    return list(clock.alive)


def test_ranks_that_move_or_rest_together_are_left_alone(ranks: list[Rank], clock: Clock) -> None:
    """A long validation or save is no hang: all stand at the same place."""
    for number in range(5):
        clock.now += 50
        assert [rank.act(f"step {number}") for rank in ranks] == [None] * 3
    for _ in range(5):
        clock.now += 50
        assert [rank.act() for rank in ranks] == [None] * 3


def test_a_silent_rank_is_named_by_the_one_before_it(ranks: list[Rank], clock: Clock) -> None:
    for _ in range(2):
        clock.now += 50
        verdicts = [ranks[0].act("a"), ranks[2].act("a")]  # nothing of rank 1
    assert verdicts == [None, None]  # for 50 seconds
    clock.now += 11
    verdict = ranks[0].act("b")
    assert verdict is not None and verdict.rank == 1 and "no sign of life" in verdict.text
    assert ranks[2].act("b") is None  # it listens to rank 0 alone


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_every_rank_is_listened_to(ranks: list[Rank], clock: Clock, silent: int) -> None:
    """The first one too, by the last: a frozen rank that nobody listens to costs the whole job's time."""
    others = [rank for number, rank in enumerate(ranks) if number != silent]
    for step in range(2):
        clock.now += 50
        assert [rank.act(f"step {step}") for rank in others] == [None, None]
    clock.now += 11
    verdicts = [verdict for rank in others if (verdict := rank.act("step 2")) is not None]
    assert [verdict.rank for verdict in verdicts] == [silent]


def test_a_rank_that_lives_but_stands_behind_is_named(ranks: list[Rank], clock: Clock) -> None:
    """It hangs in its data, its disk or an endless loop, and the others in the collective that it does not come to."""
    for rank in ranks:
        rank.act("before_forward of step 7")
    for rank in (ranks[0], ranks[2]):
        rank.act("before_backward of step 7")
    clock.now += 40
    assert [rank.act() for rank in ranks] == [None] * 3
    clock.now += 21
    verdicts = [rank.act() for rank in ranks]
    assert verdicts[1] is None  # it sees nobody behind it
    for verdict in (verdicts[0], verdicts[2]):
        assert verdict is not None and verdict.rank == 1
        assert "'before_forward of step 7'" in verdict.text and "'before_backward of step 7'" in verdict.text


def test_a_rank_a_moment_behind_is_waited_for_however_long_the_run_has_been(ranks: list[Rank], clock: Clock) -> None:
    """What counts is the time since this rank's last step, not since its first: else a healthy run of hours ends at the
    first batch that comes late."""
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
    """Rank 1 was killed on another machine at a place that rank 0 has come to too, where it waits for rank 1."""
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
    assert verdict is not None and verdict.rank == 1 and verdict.text.startswith("is gone: its process has ended")
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


def test_a_rank_alone_with_a_launcher_touches_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BEATS_FOLDER, str(tmp_path))
    rank = Heartbeat(HashStore(), 5, 8, timeout_seconds=60)
    file = tmp_path / "5"
    before = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == before:  # the clock of the file system is coarse
        rank.touch()
    assert int(file.read_text()) > 1
