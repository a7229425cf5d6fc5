"""SIGINT, SIGTERM and SIGUSR1 end a program with a documented exit code, from its first line to its last.

A program handles them before it imports anything heavy, and keeps the handlers. Until something else handles them
(training, which saves first, or the launcher, which forwards them) a signal ends the program at once with 75: no
partial output is visible, and the same command starts again. Once the exit code is known, a signal cannot change it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from modernbert_train.distributed.launched import tells_signals
from modernbert_train.errors import StoppedEarly

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
_HANDLED_SECONDS = 0.5  # after which a main thread that runs Python has handled a signal

_code: int | None = None  # exit code of this program, once it is known
_before_a_stop: list[Callable[[], object]] = []


def take_over() -> None:
    """Let a stop signal end this process at once from now on; for programs only, as their first act."""
    for number in STOP_SIGNALS:
        signal.signal(number, stop_at_once)
    atexit.register(_ignore)  # the first registered function runs last


def end(code: int) -> NoReturn:
    """End the program with this exit code; a later signal only speeds it up.

    Registered exit functions run, but Python's module teardown is skipped: a thread inside C++ at that time, ours or a
    library's, would abort the process, and a run that stopped in order would count as a crash.
    """
    global _code
    _code = code
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.exit(code)  # let Python report the failed write
    _do_what_was_registered()
    os._exit(code)


def _do_what_was_registered() -> None:
    """Run exit functions as Python does at exit, in its order."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()


def do_before_a_stop(call: Callable[[], object]) -> None:
    """Register a quick function to run when a signal ends this program at once, where no other clean-up runs."""
    _before_a_stop.append(call)


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal in a program without state to save. Raises nothing: that could be caught, or wait for others.

    Of several ranks the first one reports it for all, unless their launcher has.
    """
    if _code is None and tells_signals():
        say_stopped(number)
    for call in _before_a_stop:
        call()
    os._exit(StoppedEarly.exit_code if _code is None else _code)


def say_stopped(number: int) -> None:
    """Print the message for a program without state to save."""
    say(f"{signal.Signals(number).name}: stopped. The same command starts again.")


def say(line: str) -> None:
    """Print a line to standard error from a handler, which may have interrupted a print."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], Any], numbers: tuple[signal.Signals, ...] = STOP_SIGNALS
) -> Iterator[None]:
    """Context in which a handler gets the signals; afterwards the previous handlers do. Main thread only.

    Every signal reaches one of the two: there is no gap between them.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            # None: the previous handler was not set by Python
            signal.signal(number, signal.SIG_DFL if handler_before is None else handler_before)


@contextmanager
def stoppable_in_c() -> Iterator[None]:
    """Let a stop signal end the program while its main thread waits inside C++, where no Python handler runs.

    A thread is told of signals by Python's C handler. It acts if `stop_at_once` is the handler and has not run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def watch() -> None:
        while number := os.read(reads, 1):
            if number[0] in STOP_SIGNALS and signal.getsignal(number[0]) is stop_at_once:
                time.sleep(_HANDLED_SECONDS)
                stop_at_once(number[0], None)
        os.close(reads)

    before = signal.set_wakeup_fd(writes)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writes)


@contextmanager
def kept() -> Iterator[None]:
    """Context for imports: keep the present handlers of the stop signals, even if imported code sets others."""
    real = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in STOP_SIGNALS else real(number, handler)

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = real


def _ignore() -> None:
    """Ignore the signals: Python is about to drop all handlers, and a signal would then change the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
