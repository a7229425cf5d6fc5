"""Embed a file of texts into a file of vectors, one row for each text in order, with one part in memory at a time.

The texts are read twice: first to check all of them, before any computation. The file of vectors gets its name when
it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from modernbert_train.core.files import ending, os_errors_as, values_as, whole_file
from modernbert_train.core.text import plural
from modernbert_train.data.read.task_rows import ENDS, lines_of, require_text, table_rows
from modernbert_train.errors import ConfigError, DataError, StorageError
from modernbert_train.evaluate.loaded import load_model
from modernbert_train.report.counting import Counting

_MAX_TEXTS, _MAX_CHARACTERS = 8192, 1 << 20  # in memory at a time, approximately
_ENDS = (".txt", *ENDS)
Write = Callable[[NDArray[Any]], object]


def embed_file(
    model: str | Path,
    texts: Path,
    out: Path,
    *,
    column: str,
    pooling: Literal["cls", "mean"],
    batch_tokens: int,
    precision: Literal["auto", "fp32", "bf16"],
    dtype: Literal["float32", "float16"],
) -> str:
    """Embed the texts of a file.

    Args:
        model: see `load_model`.
        texts: .txt with one a line, .jsonl or .parquet.
        out: .npy, an array [texts, width]; or .parquet, a column `embedding`.
        column: name of the column or key with the texts, except in .txt.
        pooling, batch_tokens, precision: see `LoadedEncoder.embed`.
        dtype: number type of the written vectors.

    Returns:
        A line with counts and speed.

    Raises:
        ConfigError: `out` cannot be written, a file has another ending, or this machine lacks bf16.
        DataError: a text is empty or none; names its line. Or there is no such model.
        StorageError: the disk refuses the vectors; no partial file remains.
    """
    if ending(texts) not in _ENDS:
        raise ConfigError(f"{texts}: unknown file extension. Give a file that ends in {_ends(_ENDS)}.")
    if out.suffix not in _WRITERS:
        raise ConfigError(f"--out={out}: unknown file extension. Let it end in {_ends(_WRITERS)}.")
    if out.exists():
        raise ConfigError(f"--out={out}: exists already. Name a file that does not.")
    with _to_disk(out), whole_file(out) as file:  # refused before anything is computed
        total = sum(1 for _ in _texts_of(texts, column))
        if not total:
            raise DataError(f"{texts}: contains no text. Give a file with at least one.")
        encoder = load_model(model)
        width, room = encoder.config.hidden_size, encoder.max_tokens - 2
        counting, tokens, cut = Counting("texts", total), 0, 0
        began = time.monotonic()
        with _WRITERS[out.suffix](file, total, width, dtype) as write:
            for part in _parts(_texts_of(texts, column)):
                ids = encoder.token_ids(part)
                vectors = encoder.embed_ids(ids, pooling=pooling, batch_tokens=batch_tokens, precision=precision)
                write(vectors.numpy().astype(dtype))
                tokens += sum(min(len(each), room) + 2 for each in ids)
                cut += sum(len(each) > room for each in ids)
                counting.add(len(part))
        if counting.done != total:
            raise DataError(f"{texts}: was changed while it was read. Start again.")
    words = f", {cut:,} of them cut at {encoder.max_tokens:,} tokens" if cut else ""
    seconds = time.monotonic() - began
    return f"{out}: {plural(total, 'text')}{words}, {width} x {dtype} each; {tokens:,} tokens in {seconds:.1f} s"


def _to_disk(out: Path) -> AbstractContextManager[None]:
    remedy = "Free some space, fix the permissions, or name a file elsewhere."
    return os_errors_as(StorageError, f"--out={out}: cannot be written", remedy)


def _parts(texts: Iterator[str]) -> Iterator[list[str]]:
    part: list[str] = []
    characters = 0
    for text in texts:
        part.append(text)
        characters += len(text)
        if len(part) >= _MAX_TEXTS or characters >= _MAX_CHARACTERS:
            yield part
            part, characters = [], 0
    if part:
        yield part


# --- texts -----------------------------------------------------------------------------------------------------------


def _texts_of(path: Path, column: str) -> Iterator[str]:
    """Yield every text of a file.

    Raises:
        DataError: it cannot be read, or a text is missing or of another type; names the line.
    """
    with values_as(DataError, str(path)):
        for line, text in lines_of(path) if ending(path) == ".txt" else _column(path, column):
            require_text(text, f"line {line}")
            if not text.strip():
                raise ValueError(f"line {line}: is empty. Correct it, or remove it: a text is a vector.")
            yield text


def _column(path: Path, column: str) -> Iterator[tuple[int, str]]:
    return ((row.line, row.texts[0]) for row in table_rows(path, [column], keys="--column"))


# --- vectors ---------------------------------------------------------------------------------------------------------


@contextmanager
def _npy(file: IO[bytes], total: int, width: int, dtype: str) -> Iterator[Write]:
    head = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (total, width)}
    np.lib.format.write_array_header_1_0(file, head)
    yield lambda vectors_ND: file.write(vectors_ND.tobytes())


@contextmanager
def _parquet(file: IO[bytes], total: int, width: int, dtype: str) -> Iterator[Write]:
    import pyarrow
    from pyarrow import parquet

    numbers = pyarrow.float16() if dtype == "float16" else pyarrow.float32()
    schema = pyarrow.schema([("embedding", pyarrow.list_(numbers, width))])

    def write(vectors_ND: NDArray[Any]) -> None:
        values = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors_ND.ravel(), numbers), width)
        writer.write_table(pyarrow.Table.from_arrays([values], schema=schema))

    with parquet.ParquetWriter(file, schema) as writer:
        yield write


_WRITERS: dict[str, Callable[[IO[bytes], int, int, str], Any]] = {".npy": _npy, ".parquet": _parquet}


def _ends(table: Iterable[str]) -> str:
    return " or ".join(table)
