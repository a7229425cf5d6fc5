"""Datasets of the Hugging Face hub, through the library `datasets`; what was fetched once needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.tables import some
from modernbert_train.errors import DataError


def read_hub(
    task: TaskConfig, split: str, labelled: bool = True
) -> tuple[Iterator[Mapping[str, Any]], tuple[str, ...]]:
    """The rows of a split, and the names of its classes where the dataset has them and labels are read.

    Raises:
        DataError: it cannot be had, or lacks a column.
    """
    import datasets

    try:
        found: Any = datasets.load_dataset(task.data, task.subset, split=split)
    except Exception as error:  # a network, a cache and a stranger's files can fail in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise DataError(
            f"data={task.data}: the hub does not give it ({reason}). Correct data, subset and the split {split!r}, or "
            "name a folder with a file for each split: data=FOLDER."
        ) from None
    texts, label = task.text_columns, task.label_column
    if task.kind == "tokens":
        texts, label = [task.word_column], task.tag_column
    columns = (*texts, *([label] if labelled else []), *([task.id_column] if task.id_column else []))
    if missing := [column for column in columns if column not in found.column_names]:
        raise DataError(
            f"data={task.data}, split {split!r}: has no {some(missing)}; it has {some(found.column_names)}. Set "
            "text_columns, label_column and id_column to names of them."
        )
    kind = found.features[label] if labelled else None
    return iter(found), tuple(getattr(getattr(kind, "feature", kind), "names", None) or ())  # of a list its items'
