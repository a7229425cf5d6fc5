"""Rows of texts, or pairs of texts, with a label in another column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.read.task_rows import ENDS, TaskRow, table_rows
from modernbert_train.evaluate.finetune.examples import Example

KEYS = "text_columns, label_column and id_column"  # that name columns, for messages


class Texts:
    """See `Kind`."""

    ends: tuple[str, ...] = ENDS
    decides: tuple[str, ...] = ()

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """See `Kind`."""
        return task.text_columns, [task.label_column] if labelled else []

    def rows(self, path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[TaskRow]:
        """See `Kind`."""
        texts, others = self.columns(task, labelled)
        return table_rows(path, texts, [*others, *([named] if named else [])], KEYS)

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`."""
        return example
