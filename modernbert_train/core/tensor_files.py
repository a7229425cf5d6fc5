"""Safetensors files: permissions follow the umask, and errors name the file and the problem."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from modernbert_train.core.files import values_as

_WRONG = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError)  # raised for an inconsistent header
_FLOATING = ("F64", "F32", "F16", "BF16")
_STORED = (*_FLOATING, "I64", "I32")  # step counts are integers
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_CHUNK_BYTES = 1 << 22  # hashed, checked and written at a time; a multiple of 8, so no number is cut
_SYNC_BYTES = 1 << 28  # written between syncs to disk
Slice = tuple[int, int]  # a range of a tensor's rows: its first row, and the rows of the whole tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file.

    The library's own files are readable by their owner only, regardless of the umask; this one follows the umask.

    Raises:
        OSError: the disk refuses it.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(mode)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a file, of any dtype, memory-mapped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or not a safetensors file.
    """
    _require_readable(path)
    with _reading():
        return safetensors.torch.load_file(path)


def _require_readable(path: Path) -> None:
    """Raise the OSError of a file that cannot be opened, with its reason, which the library's error lacks."""
    path.open("rb").close()


def _reading() -> AbstractContextManager[None]:
    """Context that turns any error of the library into a ValueError."""
    return values_as(ValueError, "not a readable safetensors file", *_WRONG)


def read_shapes(path: Path, *, floating: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a file; reads only its header.

    Args:
        path: the file.
        floating: require floating-point tensors; else integers are allowed too.

    Raises:
        OSError: the file cannot be read.
        ValueError: its header is damaged, or a tensor has another dtype.
    """
    _require_readable(path)
    shapes = {}
    with _reading(), safetensors.safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (the library's own method)
            part = file.get_slice(name)
            if (kind := part.get_dtype()) not in (_FLOATING if floating else _STORED):
                raise ValueError(f"{name} is of type {kind}")
            shapes[name] = tuple(part.get_shape())
    return shapes


@dataclass(frozen=True)
class Written:
    """Size, hash and finiteness of a written file.

    Attributes:
        bytes: its size.
        xxh3_128: its hash, in hexadecimal.
        not_finite: names of the tensors with NaN or an infinity.
    """

    bytes: int
    xxh3_128: str
    not_finite: list[str]


def write_hashed(path: Path, tensors: Mapping[str, Tensor], on_sync: Callable[[], object] = lambda: None) -> Written:
    """Write a new file and sync it to disk, in one pass over the tensors and without holding the GIL.

    The hash is of the intended contents. Reading the file back would read the page cache, which would reveal losses on
    the way there but not on the disk; the next reader of the file detects both.

    Args:
        path: of the file, which must not exist.
        tensors: on the CPU.
        on_sync: called after each sync.

    Raises:
        OSError: the disk refuses it.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    not_finite: set[str] = set()
    with path.open("xb", buffering=0) as file:
        start = struct.pack("<Q", len(text)) + text
        _write(file, memoryview(start), digest)
        unsynced = 0
        for name in order:
            tensor, finite = tensors[name], True
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            for first in range(0, len(content), _CHUNK_BYTES):
                chunk = content[first : first + _CHUNK_BYTES]
                finite = finite and _all_finite(chunk, tensor.dtype)
                _write(file, chunk.data, digest)
                unsynced += len(chunk)
                if unsynced >= _SYNC_BYTES:
                    os.fdatasync(file.fileno())
                    unsynced = 0
                on_sync()
            if not finite:
                not_finite.add(name)
        os.fsync(file.fileno())
    return Written(len(start) + at, digest.hexdigest(), [name for name in tensors if name in not_finite])


def _write(file: Any, content: memoryview, digest: Any) -> None:
    digest.update(content)
    while content:
        content = content[file.write(content) :]  # a write may be partial


def _all_finite(chunk: np.ndarray[Any, Any], dtype: torch.dtype) -> bool:
    if not dtype.is_floating_point:
        return True
    if dtype is torch.bfloat16:  # NaN and infinities have all exponent bits set; numpy lacks bf16
        return not bool(((chunk.view(np.uint16) & 0x7F80) == 0x7F80).any())
    kinds = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
    return bool(np.isfinite(chunk.view(kinds[dtype])).all())


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name, each whole in one file or in row slices in several; read on access.

    Args:
        folder: of the files.
        files: by name, each with the slice of every tensor that is not whole in it.
        floating: see `read_shapes`.

    Attributes:
        shapes: of the whole tensors, by name.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged, or the slices of a tensor do not form a whole; names both.
    """

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, Slice]], *, floating: bool = True) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, int, Path]]] = {}  # by tensor: first row, rows, file
        self._open: dict[Path, Any] = {}
        for file, slices in files.items():
            shapes = read_shapes(folder / file, floating=floating)
            if strangers := slices.keys() - shapes.keys():
                raise ValueError(f"{file} lacks {min(strangers)}")
            for name, shape in shapes.items():
                first, rows = slices.get(name, (0, shape[0] if shape else 1))
                whole_shape: tuple[int, ...] = (rows, *shape[1:]) if shape else ()
                if self.shapes.setdefault(name, whole_shape) != whole_shape:
                    raise ValueError(
                        f"{file}: {name} is a slice of {whole_shape}, and of {self.shapes[name]} elsewhere"
                    )
                self._pieces.setdefault(name, []).append((first, shape[0] if shape else 1, folder / file))
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece[:2])
            at = 0
            for first, rows, _ in pieces:
                if first != at:
                    raise ValueError(f"the slices of {name} do not join: {at} rows, then one from row {first}")
                at += rows
            if at != (self.shapes[name][0] if self.shapes[name] else 1):
                raise ValueError(f"the slices of {name} have {at} rows of {self.shapes[name][0]}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        """Return the whole tensor, memory-mapped if it is in one file."""
        pieces = self._pieces[name]
        if len(pieces) > 1:
            return self.rows(name, 0, self.shapes[name][0])
        with _reading():
            tensor: Tensor = self._file(pieces[0][2]).get_tensor(name)
        return tensor

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Read some rows of a tensor, and nothing more.

        Raises:
            ValueError: the file was damaged after it was opened.
        """
        with _reading():
            pieces: list[Tensor] = [
                self._file(path).get_slice(name)[max(first, start) - start : min(first + count, start + rows) - start]
                for start, rows, path in self._pieces[name]
                if start < first + count and first < start + rows
            ]
            if not pieces:
                pieces.append(self._file(self._pieces[name][0][2]).get_slice(name)[0:0])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safetensors.safe_open(path, framework="pt").__enter__()
        return self._open[path]
