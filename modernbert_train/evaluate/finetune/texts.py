"""Rows of texts, or pairs of texts, with a label in another column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.read.task_rows import ENDS
from modernbert_train.evaluate.finetune.examples import Example


class Texts:
    """See `Kind`."""

    ends: tuple[str, ...] = ENDS
    decides: tuple[str, ...] = ()

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        if not 1 <= len(task.text_columns) <= 2:
            yield f"text_columns={task.text_columns}: name one column, or two for pairs of texts."

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """See `Kind`."""
        return task.text_columns, [task.label_column] if labelled else []

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`."""
        return example
