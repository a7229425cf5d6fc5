"""Read untrusted JSON; malformed input raises ValueError only.

Python's own reader accepts NaN and infinities, which are not JSON, raises RecursionError for deep nesting, and reads
files of any size. Here numbers are finite unless the caller allows otherwise, and files have a size limit. `as_type`
then checks the contents, so later code need not.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import stat
import typing
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Annotated, Any, TypeGuard

MAX_BYTES = 1 << 28  # size limit of a file, unless the caller sets another
_MAX_LINE_BYTES = 1 << 24
Count = Annotated[int, "count"]  # a non-negative whole number; see `is_count`


def is_count(value: object) -> TypeGuard[int]:
    """Return True for a whole number from 0 to 2^63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def parse_json(text: str | bytes, *, finite: bool = True, twice: Collection[str] = ()) -> Any:
    """Parse JSON text.

    Args:
        text: UTF-8 if it is bytes.
        finite: refuse NaN, infinities and numbers too large for a float; else they become floats.
        twice: keys that an object may have only once; of any other key the last value counts.

    Raises:
        ValueError: it is not JSON, not UTF-8, nested too deeply, or has a key of `twice` twice.
    """
    checks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    if twice:
        checks["object_pairs_hook"] = functools.partial(_once, twice)
    try:
        return json.loads(text, **checks)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(keys: Collection[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs) and (twice := [key for key in keys if sum(key == each for each, _ in pairs) > 1]):
        raise ValueError(f"duplicate key {twice[0]} in one object")
    return unique


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: see `parse_json`; or it has more than `max_bytes`.
    """
    return parse_json(content_of(path, max_bytes))


def content_of(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file into memory.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, which might never end.
        ValueError: it has more than `max_bytes`.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            content = file.read(size + 1)  # not max_bytes, which `read` would allocate
            if len(content) > size:  # it grew meanwhile, or the file system reports no size
                content += file.read(max_bytes + 1 - len(content))
            if len(content) <= max_bytes:
                return content
    raise ValueError(f"larger than {max_bytes:,} bytes")


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file without reading it whole; a line above 16 MB comes in pieces, which are not JSON.

    Raises:
        OSError: as `content_of`.
    """
    with open_file(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            yield line


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError as `content_of`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device and not a file", str(path))


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read a JSON-lines file, NaN allowed; return its objects and the numbers of the invalid lines.

    A missing file has no lines. Empty lines do not count.

    Raises:
        OSError: the file cannot be read.
    """
    entries: list[dict[str, Any]] = []
    wrong: list[int] = []
    with suppress(FileNotFoundError):
        for number, line in enumerate(lines_of(path), start=1):
            entry = parse_object(line)
            if entry is not None:
                entries.append(entry)
            elif line.strip():
                wrong.append(number)
    return entries, wrong


def parse_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line of a record, NaN allowed; None if it is anything else."""
    with suppress(ValueError):
        entry = parse_json(line, finite=False)
        return entry if isinstance(entry, dict) else None
    return None


def number(value: object) -> float | None:
    """Return a JSON number as a float, NaN and infinities included; None for anything else or numbers too large."""
    if type(value) is float or (type(value) is int and abs(value) < 1 << 1000):
        return float(value)
    return None


def as_type(kind: Any, value: Any, at: str = "") -> Any:
    """Check a JSON value against a type and convert it.

    Args:
        kind: int, `Count`, float, str, bool, a union with None, list[X], tuple[X, Y], dict[str, X], a TypedDict or a
            dataclass; for the last two, all fields without a default are required and unknown fields are errors.
        value: parsed JSON.
        at: its path, for messages.

    Returns:
        The value, with whole numbers converted to floats where needed, and tuples and dataclasses built.

    Raises:
        ValueError: it has another type; names the field and the value.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.NotRequired:
        return as_type(inner[0], value, at)
    if origin is Annotated:
        _require(is_count(value), at, "a whole number, 0 or above", value)
        return value
    if origin in (UnionType, typing.Union):
        if value is None and NoneType in inner:
            return None
        (not_none,) = [option for option in inner if option is not NoneType]
        return as_type(not_none, value, at)
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
    if kind is float and (as_float := number(value)) is not None:
        return as_float
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
    values = {name: as_type(hints[name], each, _below(at, name)) for name, each in value.items()}
    return kind(**values)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _optional(kind: Any) -> set[str]:
    """Return the fields that may be missing: of a dataclass those with a default, of a TypedDict as it marks them."""
    if not is_dataclass(kind):
        return {name for name, hint in _hints(kind).items() if typing.get_origin(hint) is typing.NotRequired}
    default = (MISSING, MISSING)
    return {f.name for f in fields(kind) if (f.default, f.default_factory) != default}


def _below(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _require(holds: bool, at: str, expected: str, value: Any) -> None:
    if not holds:
        raise _wrong(at, expected, value)


def _wrong(at: str, expected: str, value: Any) -> ValueError:
    text = repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__name__
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return ValueError(f"{at or 'the whole'}: expected {expected}, found {shown}")
