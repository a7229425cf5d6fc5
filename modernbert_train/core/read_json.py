"""JSON from a disk that may hold anything: what cannot be read is a ValueError, and never another exception.

Python's own reader takes NaN and infinities, which JSON does not have, ends in a RecursionError where brackets are
nested deeply, and reads files of any size. Here a number is finite, unless the writer may have meant otherwise, and a
file has a limit. `as_type` then makes sure of what is in it, so that nothing behind it has to ask.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import stat
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Annotated, Any, TypeGuard

MOST_BYTES = 1 << 28  # of a file, unless its reader says otherwise
_MOST_LINE_BYTES = 1 << 24
Count = Annotated[int, "count"]  # a whole number that counts something; see `is_count`


def is_count(value: object) -> TypeGuard[int]:
    """Whether something is a whole number, neither negative nor beyond 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """The value that JSON text stands for.

    Args:
        text: UTF-8 where it is bytes.
        finite: refuse NaN and infinities, and numbers that become infinite; else they are floats.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite) if finite else json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: see `parse_json`; or it has more than `most_bytes`.
    """
    return parse_json(content_of(path, most_bytes))


def content_of(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file that is held in memory as a whole.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, which might never end.
        ValueError: it has more than `most_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most_bytes:
            content = file.read(size + 1)  # and not of most_bytes, which `read` would allocate
            if len(content) > size:  # written to meanwhile, or of a file system that tells no size
                content += file.read(most_bytes + 1 - len(content))
            if len(content) <= most_bytes:
                return content
    raise ValueError(f"larger than {most_bytes:,} bytes")


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, however long it is; one of more than 16 MB comes in parts, which are no JSON.

    Raises:
        OSError: as `content_of`.
    """
    with open_file(path) as file:
        while line := file.readline(_MOST_LINE_BYTES):
            yield line


def open_file(path: Path) -> IO[bytes]:
    """A file to be read. Raises OSError as `content_of`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device and not a file", str(path))


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The JSON objects in a file of one to a line, which may hold NaN, and the numbers of the lines that are none.

    A file that is not there has no lines. Empty lines do not count.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[dict[str, Any]] = []
    wrong: list[int] = []
    with suppress(FileNotFoundError):
        for number, line in enumerate(lines_of(path), start=1):
            entry = parse_object(line)
            if entry is not None:
                found.append(entry)
            elif line.strip():
                wrong.append(number)
    return found, wrong


def parse_object(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a line of a record, which may hold NaN; None if there is none."""
    with suppress(ValueError):
        entry = parse_json(line, finite=False)
        return entry if isinstance(entry, dict) else None
    return None


def number(value: object) -> float | None:
    """A JSON number as a float, NaN and infinities too; None for all else, and for whole numbers beyond any float."""
    if type(value) is float or (type(value) is int and abs(value) < 1 << 1000):
        return float(value)
    return None


def as_type(kind: Any, value: Any, at: str = "") -> Any:
    """A JSON value as what it should be.

    Args:
        kind: int, `Count`, float, str, bool, a union with None, list[X], tuple[X, Y], dict[str, X], a TypedDict or a
            dataclass; of the last two every field without a default must be there, and no other.
        value: out of JSON.
        at: where it stands, for messages.

    Returns:
        The same value; whole numbers as floats where floats are wanted, tuples and dataclasses made.

    Raises:
        ValueError: it is something else; names the field and what was found.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        _require(is_count(value), at, "a whole number, 0 or above", value)
        return value
    if origin in (UnionType, typing.Union):
        if value is None and NoneType in inner:
            return None
        (rest,) = [option for option in inner if option is not NoneType]
        return as_type(rest, value, at)
    if origin is list:
        _require(isinstance(value, list), at, "a list", value)
        return [as_type(inner[0], each, f"{at}[{number}]") for number, each in enumerate(value)]
    if origin is tuple:
        _require(isinstance(value, list) and len(value) == len(inner), at, f"a list of {len(inner)}", value)
        return tuple(as_type(each, value[number], f"{at}[{number}]") for number, each in enumerate(inner))
    if origin is dict:
        _require(isinstance(value, dict), at, "an object", value)
        return {key: as_type(inner[1], each, _below(at, key)) for key, each in value.items()}
    if typing.is_typeddict(kind) or is_dataclass(kind):
        return _fields(kind, value, at)
    if kind is float and (found := number(value)) is not None:
        return found
    _require(type(value) is kind, at, _NAMES[kind], value)
    return value


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


def _fields(kind: Any, value: Any, at: str) -> Any:
    _require(isinstance(value, dict), at, "an object", value)
    hints = _hints(kind)
    for name in hints.keys() - value.keys() - _optional(kind):
        raise ValueError(f"{_below(at, name)}: missing")
    for name in value.keys() - hints.keys():
        raise ValueError(f"{_below(at, str(name)[:40])}: unknown")
    found = {name: as_type(hints[name], each, _below(at, name)) for name, each in value.items()}
    return kind(**found)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _optional(kind: Any) -> set[str]:
    """Fields of a dataclass that have a default."""
    default = (MISSING, MISSING)
    return {f.name for f in fields(kind) if (f.default, f.default_factory) != default} if is_dataclass(kind) else set()


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _require(holds: bool, at: str, wanted: str, value: Any) -> None:
    if not holds:
        raise _wrong(at, wanted, value)


def _wrong(at: str, wanted: str, value: Any) -> ValueError:
    text = repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__name__
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return ValueError(f"{at or 'the whole'}: expected {wanted}, found {shown}")
