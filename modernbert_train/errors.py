"""The errors a user can meet, and the exit code each one ends the process with.

Every message has three parts: what is wrong with its value, where it was set, what to do next.
Schedulers act on the codes: 75 means "stopped, start me again", 65 and 78 mean "do not retry, fix the input". 0 is a
finished run and 64 wrong arguments; docs/faults.md has the whole table.
"""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from modernbert_train.core.redact import redact
from modernbert_train.core.text import printable

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # never a bug, wherever it is met


class RunError(Exception):
    """Base of the errors that end a run with a message instead of a traceback; no secret is in it, and no
    control character: what strangers named is quoted, and a terminal would obey it.

    Attributes:
        at_fault: the rank and the machine whose hardware is to blame, where that is known.
    """

    exit_code = 70
    at_fault: tuple[int, str] | None = None

    def __str__(self) -> str:
        return printable(redact(super().__str__()))


class ConfigError(RunError):
    """The configuration (or a checkpoint that does not fit it) is wrong; raised before any training."""

    exit_code = 78


class PluginError(ConfigError):
    """A module of `plugins` cannot be imported; nothing can be said of a configuration that needs it."""


class DataError(RunError):
    """Text, tokenizer or shards are damaged, missing, or do not belong together."""

    exit_code = 65


class StorageError(RunError):
    """A disk or a checkpoint failed: no space, no permission, damaged files."""

    exit_code = 74


class UnstableRun(RunError):
    """Loss, gradient or weights are not finite, or the loss jumped, and stability: says stop. Not to be retried."""


class StoppedEarly(RunError):
    """A signal asked the program to stop; what there was to save is saved, and the same command goes on."""

    exit_code = 75


class StartAgain(RunError):
    """All ranks end, and the launcher starts them again: what they then do otherwise is in the run's folder."""

    exit_code = 75


class Halved(StartAgain):
    """A microbatch that the run chose by itself did not fit. Half of it is noted, and the same command goes on."""


class OutOfMemory(RunError):
    """A step did not fit in the memory of a GPU."""


class HangError(RunError):
    """A rank gave no sign of life, or kept the others waiting, for distributed.timeout_seconds."""

    exit_code = 124


def exit_code_of(work: Callable[[], int | None], *, speaks: bool = True) -> int:
    """Do what a program is for; an error of the user's is printed. Returns the exit code, 0 for None.

    Args:
        work: what it is for.
        speaks: print that it was stopped, too; of several ranks one does.
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
def interrupts_as(text: str) -> Iterator[None]:
    """Turn Ctrl-C within the block into StoppedEarly with this text."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedEarly(text) from None
