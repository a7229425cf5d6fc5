"""The launcher's last message and its exit code. Schedulers act on the code: a wrong one repeats a hopeless job for
ever, or ends one that should continue."""

from __future__ import annotations

import json
import re
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


TERM, KILL, INT, USR1 = signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGUSR1
HALVED, SHARD = "rank 1 on x: phases.a.microbatch_tokens=64 does not fit", "rank 1 on x: a shard"
# how the ranks ended, their posts, ranks without a sign of life, the first signal and the second -> code, message
ENDS: dict[str, tuple[dict[int, int], dict[int, str], set[int], int | None, int | None, int, str]] = {
    "all saved": ({0: 75, 1: 75}, {}, set(), None, None, 75, ""),
    "one was killed before it could exit": ({0: -TERM, 1: 75}, {}, set(), None, None, 75, ""),
    "the agent killed one that was slow to save": ({1: 75, 0: -KILL}, {}, set(), INT, None, 75, ""),
    "one ended while it started": ({0: 75, 1: -TERM}, {}, set(), None, None, 75, ""),
    "one posted its error": ({0: 65, 1: -TERM}, {0: "rank 1 on elsewhere: shard 3"}, set(), None, None, 65,
                             "rank 1 on elsewhere: shard 3"),
    "one only lost the one that was killed": ({0: 70, 1: -KILL}, {0: "rank 1 on x: is gone"}, set(), None, None, 70,
                                              f"rank 1 on {HERE} was ended by SIGKILL.* memory"),
    # the agent ends the others, and one that is still starting exits with 75: no reason to restart
    "an error ended one that started": ({1: 65, 0: 75}, {1: SHARD}, set(), None, None, 65, SHARD),
    "a mistake ended one that started": ({3: 78, 2: 75}, {}, set(), None, None, 78,
                                         f"rank 3 on {HERE} ended first, with exit code 78; its error is above"),
    "a mistake, and a signal too": ({0: 75, 1: 78}, {}, set(), TERM, None, 78, "rank 1 on "),
    "a kill ended one that started": ({1: -KILL, 0: 75}, {}, set(), None, None, 70,
                                      f"rank 1 on {HERE} was ended by SIGKILL"),
    # the agent lists failures as it saw them; a rank that waits for a dead one ignores SIGTERM and is killed
    "the agent killed one that waited": ({1: -signal.SIGSEGV, 0: -KILL}, {}, set(), None, None, 70,
                                         f"rank 1 on {HERE} was ended by SIGSEGV"),
    "one froze": ({0: -TERM, 1: -KILL}, {}, {1}, None, None, 124, f"rank 1 on {HERE} gave no sign of life"),
    "stopped before training": ({0: -TERM, 1: -USR1}, {}, set(), USR1, None, 75, "stopped .* nothing to save"),
    "perhaps nothing was saved": ({0: -KILL, 1: 75}, {}, set(), TERM, INT, 130, "a second signal"),
    # both end with 75; after a halving the launcher starts its ranks again, after a stop it must not
    "a microbatch was halved": ({1: 75, 0: -TERM}, {1: HALVED}, set(), None, None, 75, HALVED),
    "a stop while one was halved": ({1: 75, 0: 75}, {1: HALVED}, set(), TERM, None, 75, ""),
    "an error while one was halved": ({2: 75, 3: 65}, {3: "rank 3 on x: a shard"}, set(), None, None, 65, "rank 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_the_ranks_is_one_code_and_one_message(tmp_path: Path, case: str) -> None:
    codes, said, frozen, first, second, code, message = ENDS[case]
    signals = _Signals()
    signals.first, signals.second = first, second
    failures = {rank: failure(rank, each, tmp_path, said.get(rank, "")) for rank, each in codes.items()}
    found = outcome(failures, frozen, signals)
    assert found[0] == code and (re.match(message, found[1]) if message else not found[1])


def test_of_several_errors_the_first_is_reported(tmp_path: Path) -> None:
    """A rank that lost the others fails too, a moment later, and its error does not name the cause."""
    for rank, second in ((0, 30), (1, 20), (2, 40)):
        (tmp_path / f"{rank}.json").write_text(json.dumps({"message": f"of rank {rank}", "timestamp": second}))
    codes = {0: 70, 1: 65, 2: 70}
    failures = {rank: failure(rank, code, tmp_path) for rank, code in codes.items()}
    assert outcome(failures, set(), _Signals()) == (65, "of rank 1")


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
