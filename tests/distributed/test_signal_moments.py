"""The meaning of each signal at each moment of a program's life: a request, an exit code, or nothing.

The moments are run through in this process, with real signals; `os._exit` is recorded instead of called.
launch/test_stop_moments.py has the effect on a whole job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from modernbert_train.distributed import save_requests, stop_signals
from modernbert_train.distributed.launched import BEATS_FOLDER
from modernbert_train.distributed.save_requests import ONE_REQUEST_SECONDS, Requests, SaveRequest
from modernbert_train.distributed.stop_signals import STOP_SIGNALS

TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
STOP, NOTHING = SaveRequest(stop=True), SaveRequest()


class Ended(BaseException):
    """Replaces the process's end."""


class Program:
    """A program that trains, moment by moment; time stops until the test advances it."""

    def __init__(self) -> None:
        self.requests = Requests(None)
        self.now = 1000.0
        self.theirs: list[int] = []  # signals that the previous handlers have got
        self.ended_with: int | None = None

    def before(self) -> None:
        """Its first line is not reached."""

    def starting(self) -> None:
        """Importing, building, restoring a checkpoint: nothing to save yet."""
        stop_signals.take_over()

    def training(self) -> None:
        self.starting()
        self.requests.listen()

    def signalled(self) -> None:
        """It finishes its step, and a scheduler and the launcher may mean the same by two signals."""
        self.training()
        signal.raise_signal(USR1)
        self.now += 0.9 * ONE_REQUEST_SECONDS

    def signalled_long_ago(self) -> None:
        """It hangs in its step."""
        self.signalled()
        self.now += 0.2 * ONE_REQUEST_SECONDS

    def closing(self) -> None:
        """The last step is done."""
        self.training()
        self.requests.trained = True

    def closed(self) -> None:
        """The signals were given back."""
        self.training()
        self.requests.close()

    def refused(self) -> None:
        """Its configuration is wrong, and it is about to exit with its code."""
        self.starting()
        with pytest.raises(Ended):
            stop_signals.end(78)

    def worker(self) -> None:
        """A process that it has forked, which has not yet learnt to leave signals to the run."""
        self.training()
        self.requests._process = -1


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    program = Program()

    def end(code: int) -> None:
        program.ended_with = code
        raise Ended

    def theirs(number: int, frame: FrameType | None) -> None:
        program.theirs.append(number)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(stop_signals, "_do_what_was_registered", lambda: None)
    monkeypatch.setattr(stop_signals, "_code", None)
    monkeypatch.setattr(stop_signals, "_before_a_stop", [])
    monkeypatch.setattr(stop_signals.atexit, "register", lambda call: call)
    monkeypatch.setattr(save_requests.time, "monotonic", lambda: program.now)
    monkeypatch.delenv(BEATS_FOLDER, raising=False)
    before = {number: signal.signal(number, theirs) for number in (*STOP_SIGNALS, HUP)}
    yield program
    program.requests.close()  # else a later collection does, and gives the signals of another test away
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("moment", "number", "request_", "code", "said"),
    [
        pytest.param(Program.before, TERM, NOTHING, None, "", id="SIGTERM before the first line"),
        pytest.param(Program.starting, TERM, NOTHING, 75, "SIGTERM: stopped. The same", id="SIGTERM during the start"),
        pytest.param(Program.starting, INT, NOTHING, 75, "SIGINT: stopped. The same", id="SIGINT during the start"),
        pytest.param(Program.starting, USR1, NOTHING, 75, "SIGUSR1: stopped. The same", id="SIGUSR1 during the start"),
        pytest.param(Program.training, TERM, STOP, None, "SIGTERM: finishing this step", id="SIGTERM in a step"),
        pytest.param(Program.training, INT, STOP, None, "SIGINT: finishing this step", id="SIGINT in a step"),
        pytest.param(Program.training, USR1, STOP, None, "SIGUSR1: finishing this step", id="SIGUSR1 in a step"),
        pytest.param(Program.signalled, TERM, STOP, None, "", id="a second one within a moment is the same request"),
        pytest.param(Program.signalled_long_ago, TERM, STOP, 143, "", id="a second SIGTERM later"),
        pytest.param(Program.signalled_long_ago, INT, STOP, 130, "", id="a second SIGINT later"),
        pytest.param(Program.signalled_long_ago, USR1, STOP, 138, "", id="a second SIGUSR1 later"),
        pytest.param(Program.closing, TERM, STOP, None, "SIGTERM: the run is over", id="SIGTERM after the last step"),
        pytest.param(Program.closed, TERM, NOTHING, 75, "SIGTERM: stopped.", id="SIGTERM after training"),
        pytest.param(Program.refused, TERM, NOTHING, 78, "", id="SIGTERM when the code is known"),
        pytest.param(Program.worker, TERM, NOTHING, None, "", id="SIGTERM to a data worker"),
        pytest.param(Program.before, HUP, NOTHING, None, "", id="SIGHUP before the first line"),
        pytest.param(Program.starting, HUP, NOTHING, None, "", id="SIGHUP during the start is not ours"),
        pytest.param(Program.training, HUP, NOTHING, None, "", id="SIGHUP in a step is not ours"),
    ],
)
def test_what_a_signal_means(
    program: Program,
    moment: Callable[[Program], None],
    number: signal.Signals,
    request_: SaveRequest,
    code: int | None,
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Codes as in docs/faults.md: 75 is started again by a scheduler, 78 is not, 128 and the number is a forced end."""
    moment(program)
    capfd.readouterr()
    ended = False
    try:
        signal.raise_signal(number)
    except Ended:
        ended = True
    assert (program.ended_with, ended) == (code, code is not None)
    assert program.requests.of_this_rank() == request_
    line = capfd.readouterr().err
    assert line.startswith(said) if said else line == ""
    is_theirs = number == HUP or moment is Program.before
    assert program.theirs == [number] * is_theirs


@pytest.mark.parametrize(
    ("rank", "under_launcher", "told"),
    [
        pytest.param("0", False, True, id="a rank alone"),
        pytest.param("1", False, False, id="one of several is silent"),
        pytest.param("0", True, False, id="our launcher has said so"),
    ],
)
@pytest.mark.parametrize("moment", [Program.starting, Program.training])
def test_a_stop_is_reported_once(
    program: Program,
    moment: Callable[[Program], None],
    rank: str,
    under_launcher: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of 64 ranks, 63 lines that say the same hide the one that matters."""
    monkeypatch.setenv("RANK", rank)
    if under_launcher:
        monkeypatch.setenv(BEATS_FOLDER, "beats")
    moment(program)
    if moment is Program.starting:
        with pytest.raises(Ended):
            signal.raise_signal(TERM)
    else:
        signal.raise_signal(TERM)
    assert bool(capfd.readouterr().err) == told


def test_what_is_quick_is_done_before_a_stop(program: Program) -> None:
    done: list[str] = []
    stop_signals.do_before_a_stop(lambda: done.append("scratch removed"))
    program.starting()
    with pytest.raises(Ended):
        signal.raise_signal(TERM)
    assert done == ["scratch removed"] and program.ended_with == 75
