"""Damaged or hostile JSON: always a ValueError that names the problem and its place.

If this breaks, a torn file ends a run with a traceback where it should have continued from the checkpoint before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pytest

from modernbert_train.core.read_json import (
    Count,
    as_type,
    content_of,
    lines_of,
    read_json,
    read_lines,
)

BAD = {
    "nothing": b"",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "torn": b'{"a": 1',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "becomes infinite": b'{"a": 1e999}',
    "too long a number": b"1" * 10_000,
    "deep lists": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 1_000_000,
}


@pytest.mark.parametrize("name", BAD)
def test_whatever_cannot_be_read_is_a_value_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_bytes(BAD[name])
    with pytest.raises(ValueError, match="."):
        read_json(tmp_path / "x")


def test_a_file_beyond_its_limit_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ValueError, match="larger than 1,000 bytes"):
        read_json(tmp_path / "x", max_bytes=1000)
    with pytest.raises(ValueError, match="larger than"):
        content_of(tmp_path / "x")


@pytest.mark.runs
def test_a_line_without_an_end_comes_in_parts(tmp_path: Path) -> None:
    """A gigabyte of zeros in a record must cost neither its memory nor the lines before it."""
    (tmp_path / "x").write_bytes(b'{"step": 1}\n' + b"a" * (1 << 25) + b'\n{"step": 2}\n')
    assert max(map(len, lines_of(tmp_path / "x"))) == 1 << 24
    assert read_lines(tmp_path / "x")[0] == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("read", [read_json, read_lines])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(OSError, match="a pipe or a device and not a file"):
            read(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


def test_lines_of_a_record_are_read_around_what_is_damaged(tmp_path: Path) -> None:
    """A NaN loss is a fact of the run; binary rubbish, a list and depth are counted and do not hide what follows."""
    rubbish = bytes(range(256)).replace(b"\n", b"") + "\u2028".encode()
    lines = [b'{"loss": NaN}', rubbish, b"[1]", b"7", b"[" * 100_000, b"", b'{"step": 2}', b'{"to']
    (tmp_path / "x").write_bytes(b"\n".join(lines))
    found, wrong = read_lines(tmp_path / "x")
    assert [list(entry) for entry in found] == [["loss"], ["step"]]
    assert wrong == [2, 3, 4, 5, 8]
    assert read_lines(tmp_path / "absent") == ([], [])


class Place(TypedDict):
    at: Count
    names: list[str]


@dataclass(frozen=True)
class Saved:
    seconds: float
    place: Place | None
    lag: list[int]
    hashes: dict[str, str]


GOOD: dict[str, Any] = {"seconds": 2, "place": {"at": 0, "names": ["a"]}, "lag": [-3, 10**30], "hashes": {"x": "y"}}


def test_a_value_of_the_right_shape_comes_out_typed() -> None:
    found = as_type(Saved, GOOD)
    assert found == Saved(2.0, {"at": 0, "names": ["a"]}, [-3, 10**30], {"x": "y"})
    assert isinstance(found.seconds, float)
    assert as_type(Saved, GOOD | {"place": None}).place is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": True}, "seconds: expected a number, found True"),
        ({"seconds": 10**400}, "seconds: expected a number"),
        ({"place": []}, "place: expected an object, found list"),
        ({"place": {"at": 1.0, "names": []}}, "place.at: expected a whole number, 0 or above, found 1.0"),
        ({"place": {"at": 1 << 63, "names": []}}, "place.at: expected a whole number, 0 or above"),
        ({"place": {"at": 1}}, "place.names: missing"),
        ({"place": {"at": 1, "names": [], "more": 1}}, "place.more: unknown"),
        ({"place": {"at": 1, "names": ["a", None]}}, r"place.names\[1\]: expected text, found None"),
        ({"hashes": {"x": 1}}, "hashes.x: expected text, found 1"),
    ],
)
def test_a_value_of_another_shape_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_type(Saved, GOOD | change)
    with pytest.raises(ValueError, match="the whole: expected an object, found list"):
        as_type(Saved, [])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no file that tells no size")
def test_a_file_that_tells_no_size_is_read_whole() -> None:
    assert b"VmRSS" in content_of(Path("/proc/self/status"))
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        content_of(Path("/proc/self/status"), 100)
