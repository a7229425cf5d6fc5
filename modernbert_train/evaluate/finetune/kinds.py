"""The kinds of tasks: what each reads of files and of the hub, what it learns of it, and which objective that is.

Another is a file beside this one and a row in `KINDS`; its metrics are in config/evals.py, its figures in
evaluate/scores.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.data.tables import Row
from modernbert_train.evaluate.finetune.answers import Answers
from modernbert_train.evaluate.finetune.choices import Choices
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import Encoded, Example, Split
from modernbert_train.evaluate.finetune.numbers import Labels
from modernbert_train.evaluate.finetune.texts import Texts
from modernbert_train.evaluate.finetune.tokens import Reader
from modernbert_train.evaluate.finetune.words import Words


class Kind(Protocol):
    """One kind of task. Functions alone: nothing is kept.

    Attributes:
        ends: of the names of its files.
        decides: keys of the task that are its own and decide what is written.
    """

    ends: tuple[str, ...]
    decides: tuple[str, ...]

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """Columns that hold texts, and others, the label's last; of a table or a dataset."""

    def rows(self, path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[Row]:
        """Rows of a file: those texts, and values of the others and of the column `named`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged or lacks a column; names the line.
        """

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """A row as an example.

        Args:
            example: with the texts and the label of its row.
            others: values of the other columns but for the label.
            task: of it.
            names: of the classes, where the dataset has them.
            labelled: whether its label is read.

        Raises:
            ValueError, DataError: it is none.
        """

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """Labels of all splits as numbers. Raises DataError: one is none, or there is nothing to learn."""

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """Token ids and labels of each example's documents.

        Args:
            split: its examples.
            values: the numbers of each.
            labels: all of them.
            reader: the tokenizer.
            counts: of the split, to be added to.
        """

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """The section `objective`, but for what all kinds have.

        Args:
            task, model: of the run.
            labels: names of the classes.
            types: whether the second text of a pair has another token type.
        """


_TEXTS = Texts()
KINDS: dict[str, Kind] = {
    "single-label": _TEXTS,
    "multi-label": _TEXTS,
    "regression": _TEXTS,
    "tokens": Words(),
    "question-answering": Answers(),
    "multiple-choice": Choices(),
}
