"""The interface of a kind of labelled task, and the lookup of kinds by name.

A kind owns all that differs between tasks: how rows and labels are read, which objective learns them (which decides the
head, the loss and transformers' class of the export), the figures, and the lines of predictions.jsonl. A new kind is a
file in this folder and a row in config/task_kinds.py; relation.py is the shortest example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from modernbert_train.config.plugins import code_at
from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.task_kinds import KINDS
from modernbert_train.config.tools.finetune import TaskConfig, common_problems
from modernbert_train.config.tools.suite import SubmitConfig
from modernbert_train.data.read.task_rows import ENDS, TaskRow, table_rows
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import Encoded, Example, Split
from modernbert_train.evaluate.finetune.numbers import Labels, Logits, Outputs
from modernbert_train.evaluate.finetune.tokens import Reader

Link = Literal["softmax", "sigmoid", "identity"]
Texts = list[dict[str, Any]]  # lines of `label_sidecar.read_texts`


def column_keys(ids: str | None) -> str:
    """Return the keys that name columns, for messages; id_column only where it is read."""
    return "text_columns and label_column" if ids is None else "text_columns, label_column and id_column"


class Kind(Protocol):
    """One kind of task, without state.

    Attributes:
        ends: suffixes of its files; here of tables.
        decides: keys of this kind that determine the shards.
        repeats: True if a text with two different labels is worth a warning.
        link: meaning of a probe's outputs: logits of exclusive classes, of independent classes, or scores.
    """

    ends: tuple[str, ...] = ENDS
    decides: tuple[str, ...] = ()
    repeats: bool = True
    link: Link = "softmax"

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """Yield mistakes in the keys of a task of this kind, found without its files."""
        if not 1 <= len(task.text_columns) <= 2:
            yield f"text_columns={task.text_columns}: name one column, or two for pairs of texts."

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """Return the columns with texts, and the other columns, the label last."""
        return task.text_columns, [task.label_column] if labelled else []

    def rows(self, path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[TaskRow]:
        """Yield the rows of a file, here a table: texts, and values of the other columns and of the column `named`.

        Raises:
            OSError, ValueError: the file cannot be read, is damaged or lacks a column; names the line.
        """
        texts, others = self.columns(task, labelled)
        yield from table_rows(path, texts, [*others, *([named] if named else [])], column_keys(named))

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """Complete an example from its row; here it is complete already.

        Args:
            example: with the texts and the label of the row.
            others: values of the other columns without the label.
            task: the task.
            names: of the classes, where the dataset has them.
            labelled: True if the label is read.

        Raises:
            ValueError, DataError: the row is invalid.
        """
        return example

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """Return the labels of all splits as numbers. Raises DataError if one is invalid or nothing can be learned."""

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """Yield token ids and labels of each example's documents.

        Args:
            split: its examples.
            values: the numbers of each example.
            labels: all labels.
            reader: the tokenizer.
            counts: of the split; this method adds to them.
        """

    def only_label(self, values: NDArray[Any]) -> str | None:
        """Return the only label of a split as text, if its figures would be meaningless; else None."""
        return None

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """Return the section `objective` of the run, without the keys that all kinds share.

        Args:
            task, model: of the run.
            labels: names of the classes.
            types: True if the second text of a pair has another token type.
        """

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """Return the loss and the metrics of a split."""

    def predicted(self, texts: Texts, logits: Logits, objective: Any) -> Iterator[dict[str, Any]]:
        """Yield `prediction` and `scores` of each text, from logits as in `figures`."""

    def submit_problems(self, part: SubmitConfig, classes: Sequence[str]) -> Iterator[str]:
        """Yield mistakes in a file of a suite's `submit`; here for kinds without one class or score for each text.

        Args:
            part: the file.
            classes: their names; empty while they are unknown.
        """
        yield (
            f"split={part.split}: a file for a test server has one class or score for each text, and this kind of task "
            "has neither. Leave it out; predictions.jsonl has the split if keys has predict: {NAME: SPLIT}."
        )

    def submitted(self, prediction: Any, part: SubmitConfig, classes: Sequence[str]) -> str:
        """Return the value of a text in a file of `submit`; `prediction`: as `predicted` gives it."""
        raise NotImplementedError


@cache
def kind_of(name: str) -> Kind:
    """Return the kind of this name; imports its file."""
    kind: Kind = code_at(f"{__package__}.{KINDS[name].code}")()
    return kind


def task_problems(task: TaskConfig) -> Iterator[str]:
    """Yield mistakes in a task that can be found without its files."""
    yield from common_problems(task)
    yield from kind_of(task.kind).problems(task)
