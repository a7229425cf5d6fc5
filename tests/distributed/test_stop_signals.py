"""The handler of SIGTERM, SIGINT and SIGUSR1 at each time. If this breaks, a stopped job is not restarted, or a program
that calls us can no longer be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from modernbert_train.distributed import save_requests
from modernbert_train.distributed.save_requests import Requests, SaveRequest
from modernbert_train.distributed.stop_signals import STOP_SIGNALS, handled_by, kept
from tests.support.jobs import environment

PROGRAM = """\
import atexit, os, signal
from modernbert_train.distributed import stop_signals
stop_signals.take_over()

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

{when}
stop_signals.end({code})
"""

IN_A_STORE = """\
import threading, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask():
    while True:
        store.set("key", 1000 * "value")

for _ in range(2):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.3)
"""


def theirs(number: int, frame: FrameType | None) -> None:
    """A handler of the program that calls us."""


@pytest.fixture
def their_handlers() -> Iterator[None]:
    before = [signal.signal(number, theirs) for number in STOP_SIGNALS]
    yield
    for number, handler in zip(STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


@pytest.mark.usefixtures("their_handlers")
def test_training_gives_the_signals_back() -> None:
    """A notebook that has trained must be interruptible as before, also if training never installed its handlers."""
    requests = Requests(None)
    requests.close()
    assert handlers() == [theirs] * 3
    requests.listen()
    signal.raise_signal(signal.SIGUSR1)
    assert requests.of_this_rank() == SaveRequest(stop=True)
    requests.close()
    assert handlers() == [theirs] * 3
    with handled_by(lambda number, frame: None), pytest.raises(ZeroDivisionError), handled_by(theirs):
        raise ZeroDivisionError
    assert handlers() == [theirs] * 3


@pytest.mark.usefixtures("their_handlers")
def test_in_a_thread_signals_are_left_alone() -> None:
    """Python lets only the main thread take them; training in a thread used to fail over it."""
    failed: list[Exception] = []

    def train() -> None:
        requests = Requests(None)
        try:
            requests.listen()
            requests.close()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert not failed and handlers() == [theirs] * 3


@pytest.mark.usefixtures("their_handlers")
def test_an_import_cannot_take_them() -> None:
    """Other signals are its own affair."""
    real, other = signal.signal, signal.getsignal(signal.SIGUSR2)
    with kept():
        assert all(signal.signal(number, signal.SIG_DFL) == theirs for number in STOP_SIGNALS)
        signal.signal(signal.SIGUSR2, theirs)
        assert signal.getsignal(signal.SIGUSR2) == theirs
    assert handlers() == [theirs] * 3 and signal.signal is real
    signal.signal(signal.SIGUSR2, other)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("when", "code", "found"),
    [
        ("atexit.register(os.kill, os.getpid(), signal.SIGTERM)", 78, 78),
        ("last = Last()", 0, 0),  # during Python's module teardown, when no handler of ours can run
        (IN_A_STORE, 75, 75),  # a thread inside C++ when Python ends, which aborts the process
    ],
)
def test_a_code_that_is_known_stands(when: str, code: int, found: int) -> None:
    """A wrong configuration must not be started again because the scheduler lost its patience meanwhile."""
    text = PROGRAM.format(when=when, code=code)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment(), capture_output=True, text=True, timeout=60, cwd=os.sep
    )
    assert (done.returncode, done.stderr) == (found, ""), done


def test_a_checkpoint_is_overdue_once_in_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, and not in every step after the first interval, which would write checkpoints instead of training."""
    now = 1000.0
    monkeypatch.setattr(save_requests.time, "monotonic", lambda: now)
    asked = Requests(60.0)
    for _ in range(3):
        now += 59
        assert not asked.of_this_rank().overdue
        now += 1
        assert asked.of_this_rank().overdue
        asked.saved()
        assert not asked.of_this_rank().overdue
    now += 1e9
    assert not Requests(None).of_this_rank().overdue
