"""Small corpora."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

# of the fixtures of tests/data_prep/conftest.py
Command = Callable[..., int]
Refusal = Callable[..., str]
Files = Callable[[Path], dict[str, bytes]]


def write_corpus(folder: Path, texts: list[str]) -> Path:
    for i, text in enumerate(texts):
        file = folder / f"part{i % 3}" / f"{i:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def tokens_of(folder: Path) -> list[list[int]]:
    """Return all documents, read by mosaicml-streaming itself."""
    from streaming import (
        StreamingDataset,  # after modernbert_train.data.shard_writer, which allows importing it without torchvision
    )

    dataset = StreamingDataset(local=str(folder), shuffle=False, batch_size=1, validate_hash="xxh64")
    return [dataset[i]["tokens"].tolist() for i in range(dataset.num_samples)]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSONL, Parquet or CSV, by the file's ending. In CSV lists are joined by blanks."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        with file.open("w", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, [*rows[0]])
            writer.writeheader()
            for row in rows:
                writer.writerow({key: " ".join(cell) if type(cell) is list else cell for key, cell in row.items()})


def report_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "prepare_report.json").read_text(encoding="utf-8"))


_LINE = "the model reads a line of text and learns which words stand near others in it while time goes by"
WORDS = _LINE.split()


def prose(letters: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    text = " ".join(draw.choice(WORDS) for _ in range(letters // 4))
    return text[:letters]


def write(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file
