"""The launcher's last message and its exit code. Schedulers act on the code: a wrong one repeats a hopeless job for
ever, or ends one that should continue."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch.ranks import _Signals, outcome, start_ranks

HERE = socket.gethostname()


def failure(rank: int, code: int, folder: Path, said: str = "") -> ProcessFailure:
    """Return torch's object for a failed rank, with the error file that the rank wrote."""
    file = folder / f"{rank}.json"
    if said:
        file.write_text(json.dumps({"message": said, "timestamp": int(time.time())}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))


def ended(
    folder: Path,
    codes: dict[int, int],
    said: dict[int, str] | None = None,
    frozen: set[int] | None = None,
    first: int | None = None,
    second: int | None = None,
) -> tuple[int, str]:
    signals = _Signals()
    signals.first, signals.second = first, second
    failures = {rank: failure(rank, code, folder, (said or {}).get(rank, "")) for rank, code in codes.items()}
    return outcome(failures, frozen or set(), signals)


def test_saved_on_all_ranks_is_75_for_a_signal_to_any_rank(tmp_path: Path) -> None:
    assert ended(tmp_path, {0: 75, 1: 75}) == (75, "")
    assert ended(tmp_path, {0: -signal.SIGTERM, 1: 75}) == (75, "")  # the agent killed it before it could exit


def test_the_rank_that_posted_its_error_is_named_and_gives_the_code(tmp_path: Path) -> None:
    said = "rank 1 on elsewhere: shard 3 is damaged"
    assert ended(tmp_path, {0: 65, 1: -signal.SIGTERM}, {0: said}) == (65, said)


def test_of_several_errors_the_first_is_reported(tmp_path: Path) -> None:
    """A rank that lost the others fails too, a moment later, and its error does not name the cause."""
    for rank, second in ((0, 30), (1, 20), (2, 40)):
        (tmp_path / f"{rank}.json").write_text(json.dumps({"message": f"of rank {rank}", "timestamp": second}))
    codes = {0: 70, 1: 65, 2: 70}
    failures = {rank: failure(rank, code, tmp_path) for rank, code in codes.items()}
    assert outcome(failures, set(), _Signals()) == (65, "of rank 1")


def test_a_killed_rank_is_named_before_those_that_only_lost_it(tmp_path: Path) -> None:
    code, said = ended(tmp_path, {0: 70, 1: -signal.SIGKILL}, {0: "rank 1 on x: is gone"})
    assert code == 70 and said.startswith(f"rank 1 on {HERE} was ended by SIGKILL") and "memory" in said


def test_a_rank_that_was_ended_with_the_one_that_failed_does_not_make_it_a_saved_run(tmp_path: Path) -> None:
    """The agent ends the others with SIGTERM, and one that is still starting exits with 75: no reason to restart."""
    assert ended(tmp_path, {1: 65, 0: 75}, {1: "rank 1 on x: a shard"}) == (65, "rank 1 on x: a shard")
    code, said = ended(tmp_path, {3: 78, 2: 75})
    assert code == 78 and said.startswith(f"rank 3 on {HERE} ended first, with exit code 78")
    code, said = ended(tmp_path, {1: -signal.SIGKILL, 0: 75})
    assert code == 70 and said.startswith(f"rank 1 on {HERE} was ended by SIGKILL")
    assert ended(tmp_path, {1: 75, 0: -signal.SIGKILL}, first=signal.SIGINT) == (75, "")  # saved, and slow to end


def test_the_rank_that_was_killed_first_is_named_and_not_one_that_the_agent_killed(tmp_path: Path) -> None:
    """A rank that waits for a dead one ignores SIGTERM; the agent lists failures in the order in which it saw them."""
    _, said = ended(tmp_path, {1: -signal.SIGSEGV, 0: -signal.SIGKILL})
    assert said.startswith(f"rank 1 on {HERE} was ended by SIGSEGV")


def test_a_frozen_rank_is_124(tmp_path: Path) -> None:
    code, said = ended(tmp_path, {0: -signal.SIGTERM, 1: -signal.SIGKILL}, frozen={1})
    assert code == 124 and said.startswith(f"rank 1 on {HERE} gave no sign of life")


def test_stopped_before_training_began_is_75(tmp_path: Path) -> None:
    code, said = ended(tmp_path, {0: -signal.SIGTERM, 1: -signal.SIGUSR1}, first=signal.SIGUSR1)
    assert code == 75 and "nothing to save" in said


def test_a_second_signal_is_no_75(tmp_path: Path) -> None:
    """Perhaps nothing was saved, even if one rank exited with 75."""
    code, said = ended(tmp_path, {0: -signal.SIGKILL, 1: 75}, first=signal.SIGTERM, second=signal.SIGINT)
    assert code == 130 and "second signal" in said


def test_an_end_without_a_word_still_names_the_rank(tmp_path: Path) -> None:
    code, said = ended(tmp_path, {1: 78})
    assert code == 78 and said == f"rank 1 on {HERE} ended first, with exit code 78; its error is above"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_before_any_rank_is_there_stops_the_start(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.ranks.rank_processes", list)  # ignores workers that an earlier test has left
    with handled(number, signal.SIG_DFL):  # these tests may themselves run under nohup
        with pytest.raises(SystemExit) as ended, _Signals():
            signal.raise_signal(number)
        assert ended.value.code == 75 and signal.getsignal(number) == signal.SIG_DFL


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    with handled(signal.SIGHUP, signal.SIG_IGN), _Signals():
        signal.raise_signal(signal.SIGHUP)


@contextmanager
def handled(number: int, handler: signal.Handlers) -> Iterator[None]:
    """Set a signal's handler inside this context."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_rank_that_is_ended_because_of_another_does_not_make_a_mistake_a_stop(tmp_path: Path) -> None:
    """A rank that is ended while it starts exits with 75; a scheduler would restart a hopeless job for ever."""
    code, said = ended(tmp_path, {0: 75, 1: 78})
    assert code == 78 and said.startswith("rank 1 on ")
    assert ended(tmp_path, {0: 75, 1: 78}, first=signal.SIGTERM)[0] == 78
    assert ended(tmp_path, {0: 75, 1: -signal.SIGTERM}) == (75, "")


def test_a_microbatch_that_was_halved_is_reported_and_a_stop_is_not_taken_for_it(tmp_path: Path) -> None:
    """Both end with 75. After a halving the launcher starts its ranks again, after a stop it must not."""
    said = "rank 1 on x: phases.a.microbatch_tokens=64 does not fit"
    assert ended(tmp_path, {1: 75, 0: -signal.SIGTERM}, {1: said}) == (75, said)
    assert ended(tmp_path, {1: 75, 0: 75}, {1: said}, first=signal.SIGTERM) == (75, "")
    assert ended(tmp_path, {2: 75, 3: 65}, {3: "rank 3 on x: a shard"})[0] == 65


def test_ranks_start_again_once_for_each_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not endlessly if the note cannot be written, not with --fresh (it would move the note), not after a signal."""
    given = {"timeout_seconds": 1.0, "rendezvous_seconds": 1.0, "run_id": "run"}

    def starts(*answers: tuple[int, str, bool]) -> tuple[int, list[tuple[list[str], str]]]:
        asked: list[tuple[list[str], str]] = []

        def once(topology: object, arguments: list[str], run_id: str, *_: float) -> tuple[int, str, bool]:
            asked.append((arguments, run_id))
            return answers[len(asked) - 1]

        monkeypatch.setattr("launch.ranks._start_once", once)
        return start_ranks(None, ["train", "--fresh"], **given), asked  # type: ignore[arg-type]

    code, asked = starts((75, "64 does not fit", False), (75, "32 does not fit", False), (0, "", False))
    assert code == 0
    assert asked == [(["train", "--fresh"], "run"), (["train"], "run-2"), (["train"], "run-3")]
    assert starts((75, "64 does not fit", False), (75, "64 does not fit", False))[0] == 70
    assert starts((75, "stopped", True))[0] == 75 and starts((75, "", False))[0] == 75
    assert starts((78, "a mistake", False))[0] == 78
