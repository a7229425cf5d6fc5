"""Safetensors files: readable by whom the umask says, and with errors that name the file and what is wrong in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

_WRONG = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError)  # a header that says what cannot be
_FLOATING = ("F64", "F32", "F16", "BF16")
_STORED = (*_FLOATING, "I64", "I32")  # counts of steps are whole numbers


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file.

    The library leaves a file that only its owner can read, whatever the umask; this one is like all others.

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


def read_tensors(path: Path, *, floating: bool = True) -> dict[str, Tensor]:
    """Every tensor of a file, mapped from it; see `read_shapes`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not what it should be.
    """
    read_shapes(path, floating=floating)
    try:
        return safetensors.torch.load_file(path)
    except _WRONG as error:
        raise ValueError(f"not a readable safetensors file ({error})") from None


def read_shapes(path: Path, *, floating: bool = True) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a file; only its header is read.

    Args:
        path: the file.
        floating: every tensor must be of floating-point numbers; else they may be whole numbers too.

    Raises:
        OSError: the file cannot be read.
        ValueError: its header is damaged, or a tensor is of numbers of another kind.
    """
    with path.open("rb"):
        pass  # an OSError with its reason, where the library has one without
    found = {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the library's own method)
                part = file.get_slice(name)
                if (kind := part.get_dtype()) not in (_FLOATING if floating else _STORED):
                    raise ValueError(f"{name} is of type {kind}")
                found[name] = tuple(part.get_shape())
    except _WRONG as error:
        raise ValueError(f"not a readable safetensors file ({error})") from None
    return found
