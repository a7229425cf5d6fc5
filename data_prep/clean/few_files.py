"""A folder for datatrove's merges that keeps at most one of its files open.

A merge reads one file of signatures for each task and writes one of duplicates for each; 60,000 tasks exceed every
limit of open files. Here a file is open only while a block is read or written, which costs microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datatrove.io import DataFolder, OutputFileManager

_READ_BYTES = 1 << 28  # buffered for all files of a merge
_RECORDS = 8, 1024  # per read of a file: minimum and maximum
_WRITE_BYTES = 1 << 24  # buffered before files are opened to write them


def records_at_once(files: int, record_bytes: int) -> int:
    """Return the number of records per read of a file, so that a merge of many files stays within its memory."""
    fewest, max_records = _RECORDS
    return min(max_records, max(fewest, _READ_BYTES // (max(1, files) * record_bytes)))


class FewFiles(DataFolder):
    """datatrove's folder, for merges that keep no file open."""

    def open_files(self, paths: Iterable[str], mode: str = "rb", **_: Any) -> list[Any]:
        assert mode == "rb"
        return [_ReadInBlocks(self.resolve_paths(path)) for path in paths]

    def get_output_file_manager(self, mode: str = "wb", **_: Any) -> OutputFileManager:
        assert mode == "wb"
        return _Appended(self)


class _ReadInBlocks:
    """A file that is open only during each `read`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._at = 0

    def __enter__(self) -> _ReadInBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open."""

    @property
    def size(self) -> int:
        return Path(self.path).stat().st_size

    def tell(self) -> int:
        return self._at

    def read(self, number: int) -> bytes:
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._at)
            block = file.read(number)
        self._at += len(block)
        return block


class _Appended(OutputFileManager):
    """Output files that are opened one after the other once enough bytes wait; existing files are replaced."""

    def __init__(self, folder: DataFolder) -> None:
        super().__init__(folder, mode="wb", compression=None)
        self._waiting: dict[str, bytearray] = {}
        self._bytes = 0
        self._begun: set[str] = set()

    def write(self, filename: str, data: bytes) -> None:
        self._waiting.setdefault(filename, bytearray()).extend(data)
        self._bytes += len(data)
        if self._bytes >= _WRITE_BYTES:
            self.close()

    def close(self) -> None:
        for name, data in self._waiting.items():
            with self.fs.open(name, "ab" if name in self._begun else "wb") as file:
                file.write(data)
            self._begun.add(name)
        self._waiting, self._bytes = {}, 0
