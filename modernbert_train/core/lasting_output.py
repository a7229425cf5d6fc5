"""Standard output and error that survive the loss of their reader.

`check | head -1` closes the pipe after a line, Ctrl-C ends the `tee` after a run, and a terminal can disappear. Further
output is then discarded, and the verb ends as it would have, with its own exit code.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_NOBODY_READS = (errno.EPIPE, errno.EIO)  # EIO: a terminal that is gone


class _Lasting:
    """A stream whose reader may leave; all other attributes are the stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._do(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, act: Any) -> None:
        try:
            act()
        except OSError as error:
            if error.errno not in _NOBODY_READS:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # buffered text is discarded there too, at exit at the latest
            os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which printing never fails for lack of a reader, and is line-buffered, even into a pipe."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
            if stream.encoding.lower().replace("-", "") != "utf8":  # prints other characters as \xe9
                stream.reconfigure(errors="backslashreplace")
    ours: tuple[Any, Any] = _Lasting(before[0]), _Lasting(before[1])
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            with suppress(ValueError):  # closed
                stream.flush()
        sys.stdout, sys.stderr = before
