"""Datasets of the Hugging Face hub, through the library `datasets`, which caches downloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from modernbert_train.core.files import anything_as
from modernbert_train.data.hub import open_dataset
from modernbert_train.data.tables import Row, require_text, some
from modernbert_train.errors import DataError


def read_hub(
    data: str,
    subset: str | None,
    split: str,
    columns: tuple[Sequence[str], Sequence[str]],
    labelled: bool,
    named: str | None,
) -> tuple[Iterator[Row], tuple[str, ...]]:
    """Return the rows of a split, and the names of its classes if labels are read and the dataset has them.

    Args:
        data, subset, split: of the hub.
        columns: those with texts, and others, the label's last.
        labelled: whether that is among them.
        named: column with what names a row.

    Raises:
        DataError: it cannot be opened, or lacks a column.
    """
    remedy = f"Correct data, subset and the split {split!r}, or name a folder with a file for each split: data=FOLDER."
    with anything_as(DataError, f"data={data}: the hub does not give it", remedy):
        found = open_dataset(data, subset, split, streaming=False)
    texts, others = columns[0], [*columns[1], *([named] if named else [])]
    if missing := [column for column in (*texts, *others) if column not in found.column_names]:
        raise DataError(
            f"data={data}, split {split!r}: has no {some(missing)}; it has {some(found.column_names)}. Set "
            "text_columns, label_column and id_column to names of them."
        )
    kind = found.features[columns[1][-1]] if labelled else None
    names = tuple(getattr(getattr(kind, "feature", kind), "names", None) or ())  # of a list its items'
    return _rows(found, texts, others), names


def _rows(found: Any, texts: Sequence[str], others: Sequence[str]) -> Iterator[Row]:
    for number, row in enumerate(found, start=1):
        for column in texts:
            require_text(row[column], f"row {number}: {column}")
        yield Row(number, tuple(row[column] for column in texts), tuple(row[column] for column in others))
