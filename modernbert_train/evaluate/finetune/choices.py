"""Questions with choices, one of which is right: each is a sequence `[CLS] text [SEP] rest choice [SEP]`.

A document holds all choices of a question, [SEP] [CLS] between them. Questions may differ in the number of choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.config.tools.suite import SubmitConfig
from modernbert_train.core.files import values_as
from modernbert_train.core.text import shown_value
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.classes import NOTHING, pooling, rounded
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import Encoded, Example, Split
from modernbert_train.evaluate.finetune.kinds import Kind
from modernbert_train.evaluate.finetune.numbers import Labels, Logits, Outputs, class_name
from modernbert_train.evaluate.finetune.submitted import class_problems, class_value
from modernbert_train.evaluate.finetune.tokens import SPECIAL_TOKENS, Reader, cut


class Choices(Kind):
    """See `Kind`."""

    decides: tuple[str, ...] = ("choice_columns",)

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        yield from super().problems(task)
        others = {*task.choice_columns} - {task.label_column, *task.text_columns}
        if len(others) < max(1, len(task.choice_columns)):
            yield f"choice_columns={task.choice_columns}: name a column with a list of choices, or one for each choice."

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """See `Kind`."""
        return task.text_columns, [*task.choice_columns, *([task.label_column] if labelled else [])]

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`: one column has a list of choices, or each choice has a column; the last columns may be empty."""
        where = example.place.rpartition(": ")[2]
        choices = others[0] if len(others) == 1 else list(others)
        if not isinstance(choices, list):
            raise ValueError(f"{where}: {task.choice_columns[0]} is {shown_value(choices)}, and not a list of choices.")
        while len(others) > 1 and choices and (choices[-1] is None or not str(choices[-1]).strip()):
            choices = choices[:-1]
        if len(choices) < 2 or not all(isinstance(each, str) for each in choices):
            raise ValueError(f"{where}: {len(choices)} choices, or some that are not texts. Give at least two.")
        return example._replace(texts=(*example.texts, *choices))

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`: the index of the right choice, from 0, or its name among `labels`."""
        max_choices = max((_number(each, task) for split in splits.values() for each in split.examples), default=0)
        names = tuple(task.labels) or tuple(str(number) for number in range(max_choices))
        if len(names) < max_choices:
            raise DataError(
                f"labels={list(names)}: names {len(names)} choices, and there are up to {max_choices}. Name all."
            )
        values = {
            name: [
                _right(each, task, names) if split.labelled else np.zeros((1, 1), np.int32) for each in split.examples
            ]
            for name, split in splits.items()
        }
        return Labels(names, {}, values)

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """See `Kind`. Where a choice is too long, the longer of its text and the choice loses its end."""
        cls_id, sep_id = reader.vocabulary.cls_id, reader.vocabulary.sep_id
        texts = [_texts(example, reader.task) for example in split.examples]
        ids_of_texts = reader.ids(split.examples, texts)
        for (first, *choices), example, value in zip(ids_of_texts, split.examples, values, strict=True):
            entry = {"label": labels.names[int(value[0, 0])]} if split.labelled else {}
            if not any(text.strip() for text in example.texts):
                yield Encoded((), entry)
                continue
            between = reader.vocabulary.between
            kept = [cut([first, choice], reader.text_tokens - len(between)) for choice in choices]
            ids = [token for text, choice in kept for token in (sep_id, cls_id, *text, *between, *choice)]
            counts.truncated += len(ids) < sum(len(first) + len(choice) + 2 + len(between) for choice in choices)
            yield Encoded([(ids[SPECIAL_TOKENS:], value)], entry | {"choices": len(choices)})

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """See `Kind`."""
        own = {"name": "choose", "labels": list(labels), "pooling": pooling(task, model)}
        return own | {"segments": 2 if types else 1}

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """See `Kind`: the figures of a classifier."""
        from modernbert_train.evaluate.metrics import class_figures

        return class_figures(outputs.logits, np.concatenate(outputs.labels)[:, 0], outputs.settings.metrics)

    def predicted(self, texts: Sequence[Mapping[str, Any]], logits: Logits, objective: Any) -> Iterator[dict[str, Any]]:
        """See `Kind`."""
        for text in texts:
            if text["document"] is None:
                yield dict(NOTHING)
                continue
            logits_C, names = logits[text["document"]][: text["choices"]], objective.labels[: text["choices"]]
            shares = dict(zip(names, rounded(logits_C.softmax(dim=0)), strict=True))
            yield {"prediction": names[int(logits_C.argmax())], "scores": shares}

    def submit_problems(self, part: SubmitConfig, classes: Sequence[str]) -> Iterator[str]:
        """See `Kind`."""
        yield from class_problems(part, classes)

    def submitted(self, prediction: Any, part: SubmitConfig, classes: Sequence[str]) -> str:
        """See `Kind`."""
        return class_value(prediction, part, classes)


def _number(example: Example, task: TaskConfig) -> int:
    return len(example.texts) - len(task.text_columns)


def _texts(example: Example, task: TaskConfig) -> list[str]:
    """Return the first text, and for each choice the text after [SEP]: the second text, if any, then the choice."""
    number = len(task.text_columns)
    first, *others = example.texts[:number]
    return [first, *(" ".join(filter(str.strip, (*others, choice))) for choice in example.texts[number:])]


def _right(example: Example, task: TaskConfig, names: Sequence[str]) -> Any:
    with values_as(DataError, example.place):
        label = class_name(example.label, task.label_column, names)
    index = names.index(label) if label in names else int(label) if label.lstrip("-").isdecimal() else -1
    number = _number(example, task)
    if not 0 <= index < number:
        raise DataError(
            f"{example.place}: {task.label_column}={label}, and there are {number} choices: write 0 to {number - 1}, "
            "or name them in labels. A split that hides its labels belongs under predict."
        )
    return np.array([[index]], dtype=np.int32)
