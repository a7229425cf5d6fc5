"""Datasets as other projects write them, by the stock MDSWriter and Streaming's own merge_index.

Columns, types and folders match the programs that the projects publish; documents are given without special tokens,
which are added as in the project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train import import_stubs
from modernbert_train.vocabulary import Vocabulary

import_stubs.install()

from streaming import MDSWriter  # noqa: E402
from streaming.base.compression import decompress  # noqa: E402
from streaming.base.util import merge_index  # noqa: E402

Documents = Sequence[NDArray[np.int64]]
SHARD_BYTES = 1 << 11


def write_mds(folder: Path, columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Write one folder of shards with its index."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = {"size_limit": SHARD_BYTES} | settings
    with MDSWriter(columns=dict(columns), out=str(folder), **settings) as writer:
        for sample in samples:
            writer.write(dict(sample))


def around(document: NDArray[np.int64], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return [CLS] document [SEP]."""
    return np.concatenate([[vocabulary.cls_id], document, [vocabulary.sep_id]])


def ettin(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write sources in folders, shards in subfolders, indexes merged level by level; uint32, zstd, named documents."""
    halves = (documents[: len(documents) // 2], documents[len(documents) // 2 :])
    for number, half in enumerate(halves):
        samples = [
            {"input_ids": around(each, vocabulary).astype(np.uint32), "id": f"books-{i}"} for i, each in enumerate(half)
        ]
        part = folder / f"books/shard_{number:05d}-tokenized-chunked-1024-512-32-backfill-nodups"
        write_mds(part, {"input_ids": "ndarray:uint32", "id": "str"}, samples, compression="zstd")
    merge_index([str(path) for path in sorted(folder.glob("books/*/index.json"))], str(folder / "books"))
    merge_index([str(folder / "books/index.json")], str(folder))


def unpack(archive: Path) -> None:
    """Write the plain shard beside an archive."""
    archive.with_suffix("").write_bytes(decompress("zstd", archive.read_bytes()))


def unpacked_ettin(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write plain shards, as NoStreamingDataset requires; its script leaves an index that names archives."""
    ettin(folder, documents, vocabulary)
    for archive in list(folder.rglob("*.zstd")):
        unpack(archive)
        archive.unlink()


def mmbert(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write Ettin's layout, unpacked, with indexes only next to the shards; only a begin token."""
    for number, each in enumerate((documents[: len(documents) // 3], documents[len(documents) // 3 :])):
        samples = [
            {"input_ids": np.concatenate([[vocabulary.cls_id], ids]).astype(np.uint32), "id": str(i)}
            for i, ids in enumerate(each)
        ]
        write_mds(folder / f"lang{number}/shard_00000", {"input_ids": "ndarray:uint32", "id": "str"}, samples)


def answerdotai(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write one folder; arrays with a type known only from the sample, an attention mask, padding."""
    longest = max(map(len, documents)) + 5
    samples = []
    for i, document in enumerate(documents):
        ids = around(document, vocabulary)
        padded = np.pad(ids, (0, longest - len(ids)), constant_values=vocabulary.pad_id)
        samples.append(
            {"input_ids": padded, "attention_mask": (np.arange(longest) < len(ids)).astype(int), "id": str(i)}
        )
    columns = {"input_ids": "ndarray", "attention_mask": "ndarray", "id": "str"}
    write_mds(folder, columns, samples, compression="zstd:7", hashes=["sha1", "xxh64"], size_limit=1 << 15)


def llm_foundry(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write without concatenation: `tokens` as int32 with an end token."""
    samples = [{"tokens": np.append(each, vocabulary.sep_id).astype(np.int32)} for each in documents]
    write_mds(folder, {"tokens": "ndarray:int32"}, samples)


def raw_bytes(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write numpy's int64 as bytes, as old versions of llm-foundry and AnswerDotAI's convert_dataset.py do."""
    samples = [{"tokens": around(each, vocabulary).astype(np.int64).tobytes()} for each in documents]
    write_mds(folder, {"tokens": "bytes"}, samples)


def matrices(folder: Path, documents: Documents, vocabulary: Vocabulary) -> None:
    """Write each document as a row of a matrix, as return_tensors="np" gives it."""
    write_mds(folder, {"input_ids": "ndarray"}, [{"input_ids": each[None]} for each in documents])


LAYOUTS: dict[str, Callable[[Path, Documents, Vocabulary], None]] = {
    "ettin": ettin,
    "ettin, unpacked": unpacked_ettin,
    "mmbert": mmbert,
    "answerdotai": answerdotai,
    "llm-foundry": llm_foundry,
    "raw bytes": raw_bytes,
    "matrices": matrices,
}
