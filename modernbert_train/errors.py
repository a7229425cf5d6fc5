"""Errors for users, and the exit code of each.

Every message has three parts: the problem with its value, the place where it was set, and a remedy.
Schedulers act on the codes: 75 means "stopped, start me again", 65 and 78 mean "do not retry, fix the input". 0 is a
finished run and 64 wrong arguments; docs/faults.md has the whole table.
"""

import errno
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from modernbert_train.core.redact import redact
from modernbert_train.core.text import printable

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # never a bug


class RunError(Exception):
    """Base of the errors that end a run with a message instead of a traceback. Secrets in it are redacted, and control
    characters of untrusted names are escaped, since a terminal would interpret them.

    Attributes:
        at_fault: the rank and the machine with faulty hardware, if known.
    """

    exit_code = 70
    at_fault: tuple[int, str] | None = None

    def __str__(self) -> str:
        return printable(redact(super().__str__()))


class ConfigError(RunError):
    """The configuration (or a checkpoint that does not fit it) is wrong; raised before any training."""

    exit_code = 78


class PluginError(ConfigError):
    """A module of `plugins` cannot be imported, so a configuration that needs it cannot be checked."""


class DataError(RunError):
    """Text, tokenizer or shards are damaged, missing, or do not belong together."""

    exit_code = 65


class StorageError(RunError):
    """A disk or a checkpoint failed: no space, no permission, damaged files."""

    exit_code = 74


class UnstableRun(RunError):
    """Loss, gradient or weights are not finite, or the loss jumped, with stability: stop. Not to be retried."""


class StoppedEarly(RunError):
    """A signal stopped the program; its state is saved, and the same command continues."""

    exit_code = 75


class StartAgain(RunError):
    """All ranks end, and the launcher restarts them; the run's folder holds the change for the next start."""

    exit_code = 75


class OomBackoff(StartAgain):
    """An automatically chosen microbatch did not fit. Its half is recorded, and the same command continues."""


class OutOfMemory(RunError):
    """A step did not fit in the memory of a GPU."""


class HangError(RunError):
    """A rank sent no heartbeat, or kept the others waiting, for distributed.timeout_seconds."""

    exit_code = 124


def exit_code_of(work: Callable[[], int | None], *, speaks: bool = True) -> int:
    """Run a program's work and print a user's error. Return the exit code, 0 for None.

    Args:
        work: the work.
        speaks: also print that it was stopped; one of several ranks does.
    """
    try:
        return work() or 0
    except RunError as error:
        stopped = isinstance(error, StoppedEarly)
        if speaks or not stopped:
            print(error if stopped else f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in _OF_A_DISK:
            raise
        where = printable(redact(str(error.filename2 or error.filename or "a file or the standard output")))
        print(f"error: {where}: {error.strerror}. Free the disk, or name another place.", file=sys.stderr)
        return StorageError.exit_code


@contextmanager
def in_words_of(verb: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Context that rewrites errors about keys of a generated file to name the keys or options of the user.

    Args:
        verb: pattern -> replacement, applied in this order.
    """
    try:
        yield
    except RunError as error:
        text = str(error)
        unchanged = text
        for pattern, words in verb:
            text = re.sub(pattern, words, text)
        if text == unchanged:
            raise
        raise type(error)(text) from None


@contextmanager
def interrupts_as(text: str) -> Iterator[None]:
    """Turn Ctrl-C within the context into StoppedEarly with this text."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedEarly(text) from None
