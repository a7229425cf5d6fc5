"""SIGINT, SIGTERM and SIGUSR1: from a program's first line to its last one they end it with a code that is documented.

A program takes them over before it imports anything heavy, and never gives them back. Until something else listens to
them (training, which saves first, or the launcher, which passes them on) a signal ends the program at once with 75:
nothing half done is visible, and the same command starts again. Once the exit code is known a signal cannot change it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from modernbert_train.distributed.launched import tells_signals
from modernbert_train.errors import StoppedEarly

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)

_code: int | None = None  # of this program, once it is known
_before_a_stop: list[Callable[[], object]] = []


def take_over() -> None:
    """From here to the end of this process a stop signal ends it at once; for programs alone, as their first act."""
    for number in STOP_SIGNALS:
        signal.signal(number, stop_at_once)
    atexit.register(_ignore)  # the first to be registered is the last to run


def end(code: int) -> NoReturn:
    """End a program with this code, which stands: a signal now only hurries the end.

    All that was registered for the exit is done. What Python does after that, which is to take its modules apart, is
    not: a thread that is inside C++ then, of ours or of any library, aborts the process, and a run that has stopped in
    order counts as a crash.
    """
    global _code
    _code = code
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python reports what cannot be written
    _do_what_was_registered()
    os._exit(code)


def _do_what_was_registered() -> None:
    """As Python does at the exit of a program, and in its order."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()


def do_before_a_stop(call: Callable[[], object]) -> None:
    """Have something quick done when a signal ends this program at once, where no other clean-up runs."""
    _before_a_stop.append(call)


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """The handler of a program that has nothing to save. It raises nothing: that could be caught, or wait for others.

    Of several ranks the first one says so for all, unless their launcher has.
    """
    if _code is None and tells_signals():
        say_stopped(number)
    for call in _before_a_stop:
        call()
    os._exit(StoppedEarly.exit_code if _code is None else _code)


def say_stopped(number: int) -> None:
    """What a user is told of a program that had nothing to save."""
    say(f"{signal.Signals(number).name}: stopped. The same command starts again.")


def say(line: str) -> None:
    """Print a line to standard error from a handler, which may have interrupted a print."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], Any], numbers: tuple[signal.Signals, ...] = STOP_SIGNALS
) -> Iterator[None]:
    """While in use a handler gets the signals, afterwards whoever had them before. Only the main thread can do this.

    Every signal meets one of the two: there is no moment between them.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            # None: a handler that Python does not know
            signal.signal(number, signal.SIG_DFL if handler_before is None else handler_before)


@contextmanager
def kept() -> Iterator[None]:
    """While in use, which is during an import, nobody takes the stop signals away from who has them now."""
    real = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in STOP_SIGNALS else real(number, handler)

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = real


def _ignore() -> None:
    """Python is about to drop all handlers, after which a signal would end it with a code of its own."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
