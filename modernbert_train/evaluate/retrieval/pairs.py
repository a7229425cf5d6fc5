"""Read training pairs and triplets of texts from files or BEIR judgements, and count those left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modernbert_train.config.tools.retrieval import MineConfig, RetrievalConfig
from modernbert_train.core.files import ending, os_errors_as, values_as
from modernbert_train.data.tables import ENDS, read_rows
from modernbert_train.errors import DataError
from modernbert_train.evaluate.retrieval.beir import read_beir
from modernbert_train.evaluate.retrieval.beir_sets import beir_folder

QUERY, POSITIVE, NEGATIVE = "anchor", "positive", "negative"  # columns, as sentence-transformers calls them


@dataclass(frozen=True)
class Pairs:
    """Texts to learn from.

    Attributes:
        columns: QUERY, POSITIVE, and NEGATIVE with a number for each hard negative; equally long.
        counts: rows that are used, and those that were left out by reason.
    """

    columns: dict[str, list[str]] = field(repr=False)
    counts: dict[str, int]


def read_pairs(config: RetrievalConfig) -> Pairs:
    """Return all rows of all files, in order.

    Raises:
        DataError: a file is missing, broken or lacks a column; or fewer rows are left than a batch has.
    """
    rows, skipped = read_all({f"train[{index}]={name}": name for index, name in enumerate(config.train)}, config)
    if len(rows) < config.batch_size:
        raise DataError(
            f"train: {len(rows):,} pairs are left of {len(rows) + sum(skipped.values()):,}, which is no whole batch of "
            f"batch_size={config.batch_size}. Lower it, or give more."
        )
    names = [QUERY, POSITIVE, *(f"{NEGATIVE}_{number}" for number in range(1, len(config.negative_columns) + 1))]
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    return Pairs(columns, {"pairs": len(rows)} | skipped)


def read_all(
    names: Mapping[str, str], config: RetrievalConfig | MineConfig
) -> tuple[dict[tuple[str, ...], None], dict[str, int]]:
    """Return all rows of files or BEIR folders, with names for messages, and the number left out by reason.

    Raises:
        DataError: see `read_pairs`.
    """
    skipped = dict.fromkeys(("skipped_empty", "skipped_duplicates", "skipped_contradictions"), 0)
    rows: dict[tuple[str, ...], None] = {}
    for named, name in names.items():
        for row in _rows(beir_folder(name, config.beir_folder), named, config):
            if not all(text.strip() for text in row):
                skipped["skipped_empty"] += 1
            elif row in rows:
                skipped["skipped_duplicates"] += 1
            elif row[1] in row[2:]:  # a text that answers the query, and does not
                skipped["skipped_contradictions"] += 1
            else:
                rows[row] = None
    return rows, skipped


def _rows(path: Path, named: str, config: RetrievalConfig | MineConfig) -> Iterator[tuple[str, ...]]:
    if path.is_dir():
        yield from _of_folder(path, named, config)
        return
    if ending(path) not in ENDS:
        raise DataError(f"{named}: of which kind is it? Name one of {', '.join(ENDS)}, or a BEIR folder.")
    if not path.is_file():
        wrong = "a pipe or a device, and not a file" if path.exists() else "no such file"
        raise DataError(f"{named}: {wrong}. Correct the path.")
    columns = [config.query_column, config.positive_column, *config.negative_columns]
    unread = os_errors_as(DataError, f"{named}: cannot be read", "Name a file of pairs.")
    with unread, values_as(DataError, named):
        for row in read_rows(path, columns, keys="query_column, positive_column and negative_columns"):
            yield row.texts


def _of_folder(folder: Path, named: str, config: RetrievalConfig | MineConfig) -> Iterator[tuple[str, ...]]:
    """Yield a pair for each query and each of its relevant documents."""
    if config.negative_columns:
        raise DataError(f"{named}: a BEIR folder has no hard negatives. Leave out negative_columns, or name files.")
    beir = read_beir(folder, config.train_split, named.partition("=")[0])
    wanted = {name for judged in beir.qrels.values() for name, score in judged.items() if score > 0}
    texts, place = {}, 0
    for part in beir.texts(1024):
        for text in part:
            if (name := beir.document_ids[place]) in wanted:
                texts[name] = text
            place += 1
    for query, judged in beir.qrels.items():
        for name, score in judged.items():
            if score > 0:
                yield beir.queries[query], texts[name]
