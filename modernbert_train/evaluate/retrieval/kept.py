"""Vectors of texts kept on disk with a hash, for another search, or to resume after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modernbert_train.core.files import os_errors_as, whole_file, write_whole
from modernbert_train.core.tensor_files import read_tensors, write_tensors
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.errors import StorageError

Vectors = Tensor | list[Tensor]  # of each text one, dense or sparse, or one for each of its tokens


def kept_vectors(folder: Path, origin: Any, make: Callable[[], Vectors]) -> Vectors:
    """Read vectors from their file, or compute and write them; token vectors in fp16.

    The file is named by a hash of `origin`; a sidecar file holds its SHA-256, as `sha256sum` writes it.

    Args:
        folder: of such files.
        origin: everything that determines the vectors, as JSON.
        make: computes them.

    Raises:
        StorageError: the file is damaged, or cannot be written.
    """
    key = hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:32]
    file, sidecar = folder / f"{key}.safetensors", folder / f"{key}.sha256"
    if not sidecar.exists():
        made = make()
        is_late = isinstance(made, list)
        flat = torch.cat(made).half() if isinstance(made, list) else torch.as_tensor(made).cpu()
        sizes = torch.tensor([len(each) for each in made] if is_late else [], dtype=torch.int64)
        tensors = {"vectors": flat, "sizes": sizes}
        if flat.is_sparse:
            flat = flat.coalesce()
            tensors = {"vectors": flat.values(), "indices": flat.indices(), "sizes": torch.tensor(flat.shape)}
        with os_errors_as(StorageError, f"{file}: cannot be written", "Free the disk, or name another folder."):
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as staging:
                write_tensors(Path(staging.name), {name: each.cpu().contiguous() for name, each in tensors.items()})
            write_whole(sidecar, f"{file_sha256(file)}  {file.name}\n")
    remedy = f"Remove it and {sidecar.name}, and it is made again."
    with os_errors_as(StorageError, f"{file}: cannot be read", remedy, ValueError, IndexError):
        if file_sha256(file) != sidecar.read_text(encoding="utf-8").split()[0]:
            raise StorageError(f"{file}: not the vectors that were written. {remedy}")
        tensors = read_tensors(file)
    vectors, lengths = tensors["vectors"].float(), tensors["sizes"].tolist()
    if "indices" in tensors:
        return torch.sparse_coo_tensor(tensors["indices"], vectors, lengths, check_invariants=True).coalesce()
    return list(vectors.split(lengths)) if lengths else vectors
