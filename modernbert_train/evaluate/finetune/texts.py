"""Texts and pairs of texts with a class, classes or a score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.tables import ENDS, Row, read_rows
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import Encoded, Example, Split
from modernbert_train.evaluate.finetune.numbers import Labels, number_labels
from modernbert_train.evaluate.finetune.tokens import Reader, cut

KEYS = "text_columns, label_column and id_column"  # that name columns, for messages


class Texts:
    """See `Kind`."""

    ends: tuple[str, ...] = ENDS
    decides: tuple[str, ...] = ()

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """See `Kind`."""
        return task.text_columns, [task.label_column] if labelled else []

    def rows(self, path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[Row]:
        """See `Kind`."""
        texts, others = self.columns(task, labelled)
        return read_rows(path, texts, [*others, *([named] if named else [])], KEYS)

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`."""
        return example

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`."""
        return number_labels(task, splits)

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """See `Kind`: a text, or two with [SEP] between."""
        task = reader.task
        found = reader.ids(split.examples, [example.texts for example in split.examples])
        for parts, example, value in zip(found, split.examples, values, strict=True):
            said = {"label": _label(split, value, labels, task)} if split.labelled else {}
            if not any(parts) or not any(text.strip() for text in example.texts):
                yield Encoded((), said)
                continue
            between = reader.vocabulary.between if len(parts) > 1 else ()
            kept = cut(parts, reader.most - len(between))
            ids = [*kept[0], *between, *(kept[1] if between else ())]
            counts.truncated += len(ids) < sum(map(len, parts)) + len(between)
            counts.unseen += task.kind == "single-label" and bool((value >= len(labels.names)).any())
            yield Encoded([(ids, value)], said)

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """See `Kind`."""
        return {
            "name": "classify",
            "kind": task.kind,
            "labels": list(labels),
            "pooling": pooling(task, model),
            "segments": 2 if types and len(task.text_columns) > 1 else 1,
        }


def pooling(task: TaskConfig, model: ModelConfig) -> str:
    """What a class is told from, where the task does not say."""
    return task.pooling or ("mean" if task.freeze else model.pooling)


def _label(split: Split, value: Any, labels: Labels, task: TaskConfig) -> Any:
    """The label of a text in words."""
    if task.kind == "regression":
        return float(value[0, 0])
    if task.kind == "multi-label":
        return [labels.names[number] for number in np.flatnonzero(value[0])]
    return labels.all_names(split.key)[int(value[0, 0])]
