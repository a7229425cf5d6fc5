"""The vectors of a corpus on disk: of all tokens for late interaction, or of each text; a resumed search keeps them.

A folder has vectors.f16 or vectors.f32, T vectors of D numbers, one document after another; ends.i64, the offset after
each document's last vector; and index.json, written last for each part: the texts and weights of the vectors, and how
much of the files is complete. The next process truncates the files to that length and embeds the remaining documents.

Legend: T tokens of all documents, D width of a vector.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train.core.files import lock, os_errors_as, write_whole
from modernbert_train.core.read_json import read_json
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.errors import ConfigError, StorageError

VECTORS, ENDS, ABOUT, LOCK = "vectors.f{}", "ends.i64", "index.json", ".lock"
PART_TOKENS = 1 << 18  # vectors that are in memory, in fp32: 128 MB of width 128
_REMOVE = "Remove the folder, and it is made again."


@dataclass(frozen=True)
class TokenIndex:
    """A complete index.

    Attributes:
        vectors_TD: fp16 or fp32, mapped from the disk.
        ends_N: of each document, the place behind its last vector.
    """

    vectors_TD: NDArray[np.floating]
    ends_N: NDArray[np.int64]

    def parts(self, device: Any = "cpu", most: int = PART_TOKENS) -> Iterator[list[Tensor]]:
        """Yield the documents' matrices, in fp32, in order; at most this many vectors at once, or one document."""
        first = 0
        while first < len(self.ends_N):
            start = int(self.ends_N[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(self.ends_N, start + most, side="right")))
            sizes = np.diff(self.ends_N[first:last], prepend=start).tolist()
            part_TD = self.vectors_TD[start : int(self.ends_N[last - 1])].astype(np.float32)
            yield list(torch.from_numpy(part_TD).to(device).split(sizes))
            first = last


def make_index(
    folder: Path,
    about: Mapping[str, Any],
    parts: Iterator[list[str]],
    encode: Callable[[list[str]], Sequence[Tensor]],
    bits: int = 16,
    key: str = "index",
) -> TokenIndex:
    """Open an index and embed the documents that it lacks.

    Args:
        folder: created if missing.
        about: everything that determines the vectors.
        parts: texts of the documents.
        encode: texts -> a matrix of vectors for each.
        bits: 16 or 32, of a number.
        key: of the configuration that names the folder, for messages.

    Raises:
        ConfigError: the folder's vectors were made with another `about`.
        StorageError: it is damaged, or cannot be written.
    """
    about, dtype, name = json.loads(json.dumps(about)), np.dtype(f"f{bits // 8}"), VECTORS.format(bits)
    with (
        ExitStack() as held,
        os_errors_as(StorageError, f"{folder}: cannot be written", f"Free the disk, or set {key}."),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        locked = held.enter_context((folder / LOCK).open("a"))
        lock(locked)  # another search may be embedding the same
        there = _there(folder, about, key)
        documents, tokens, width = there["documents"], there["tokens"], there["width"]
        with (folder / name).open("ab") as vectors, (folder / ENDS).open("ab") as ends:
            for file, size in ((vectors, dtype.itemsize * tokens * width), (ends, 8 * documents)):
                if file.tell() < size:
                    raise StorageError(f"{file.name}: has {file.tell():,} of {size:,} bytes. {_REMOVE}")
                file.truncate(size)
            seen = 0
            for texts in () if there["whole"] else parts:
                seen += len(texts)
                if seen <= documents:
                    continue
                for matrix_TD in encode(texts[documents - seen :]):
                    own_TD = matrix_TD.float().cpu().numpy().astype(dtype)
                    vectors.write(own_TD.tobytes())
                    tokens, width = tokens + len(own_TD), own_TD.shape[1]
                    ends.write(np.int64(tokens).tobytes())
                documents = seen
                for file in (vectors, ends):
                    file.flush()
                    os.fsync(file.fileno())
                _note(folder, about, documents, tokens, width)
        hashes = {each: file_sha256(folder / each) for each in (name, ENDS)}
        if there["whole"] and there["sha256"] not in (None, hashes):
            raise StorageError(f"{folder}: its vectors are not those that were written. {_REMOVE}")
        _note(folder, about, documents, tokens, width, sha256=hashes)
        return TokenIndex(
            np.memmap(folder / name, dtype=dtype, mode="r", shape=(tokens, width)),
            np.fromfile(folder / ENDS, dtype=np.int64),
        )


def weights_sha256(model: torch.nn.Module) -> str:
    """Return a hash of all parameters and buffers, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _there(folder: Path, about: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The complete part of an index."""
    if not (folder / ABOUT).exists():
        if others := sorted(
            path.name
            for path in folder.iterdir()
            if not path.match(VECTORS.format("*")) and path.name not in (ENDS, LOCK)
        ):
            raise ConfigError(f"{key}={folder}: holds {', '.join(others[:5])}, and no index. Name another folder.")
        return {"documents": 0, "tokens": 0, "width": 0, "whole": False, "sha256": None}
    damage = (ValueError, TypeError, KeyError, AttributeError)
    with os_errors_as(StorageError, f"{folder / ABOUT}: is damaged", _REMOVE, *damage):
        found = read_json(folder / ABOUT)
        differing = [key for key in about if found["about"].get(key) != about[key]]
        counts = {key: int(found[key]) for key in ("documents", "tokens", "width", "whole")}
        hashes = found.get("sha256")  # indices of before 2026-11-28 have none
    if differing:
        raise ConfigError(
            f"{key}={folder}: has vectors of another corpus, model or length ({', '.join(differing)}). Name another "
            "folder, or remove it."
        )
    return {**counts, "sha256": hashes}


def _note(
    folder: Path,
    about: Mapping[str, Any],
    documents: int,
    tokens: int,
    width: int,
    *,
    sha256: Mapping[str, str] | None = None,
) -> None:
    """Write index.json; with the hashes of its files the index is complete."""
    counts = {"documents": documents, "tokens": tokens, "width": width}
    found = {"about": about, **counts, "whole": sha256 is not None, "sha256": sha256}
    write_whole(folder / ABOUT, json.dumps(found, indent=2) + "\n")
