"""Read pairs of texts from files or BEIR judgements, and count those left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from modernbert_train.config.tools.retrieval import MineConfig
from modernbert_train.core.files import ending, values_as
from modernbert_train.data.read.task_rows import ENDS, table_rows
from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval.beir import beir_folder, training_pairs


def read_all(names: Mapping[str, str], config: MineConfig) -> tuple[dict[tuple[str, ...], None], dict[str, int]]:
    """All rows of files or BEIR folders, named as in messages, and how many were left out by reason.

    Raises:
        DataError: a file is missing, broken or lacks a column.
    """
    skipped = dict.fromkeys(("skipped_empty", "skipped_duplicates"), 0)
    rows: dict[tuple[str, ...], None] = {}
    for named, name in names.items():
        for row in _rows(beir_folder(name, config.beir_folder), named, config):
            if not all(text.strip() for text in row):
                skipped["skipped_empty"] += 1
            elif row in rows:
                skipped["skipped_duplicates"] += 1
            else:
                rows[row] = None
    return rows, skipped


def _rows(path: Path, named: str, config: MineConfig) -> Iterator[tuple[str, ...]]:
    if path.is_dir():
        yield from training_pairs(path, config.train_split)
        return
    if ending(path) not in ENDS:
        raise DataError(f"{named}: of which kind is it? Name one of {', '.join(ENDS)}, or a BEIR folder.")
    columns = [config.query_column, config.positive_column]
    with values_as(DataError, named):
        for row in table_rows(path, columns, keys="query_column and positive_column"):
            yield row.texts
