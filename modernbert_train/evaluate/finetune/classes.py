"""Texts and pairs of texts with a class, several classes, or a score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.config.tools.suite import SubmitConfig
from modernbert_train.core.files import values_as
from modernbert_train.core.text import number_in, shorten, shown_value
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import TRAIN, Encoded, Example, Split
from modernbert_train.evaluate.finetune.kinds import Kind
from modernbert_train.evaluate.finetune.numbers import Labels, Logits, Outputs, in_order, named_classes, number_classes
from modernbert_train.evaluate.finetune.submitted import class_problems, class_value, score_problems, score_value
from modernbert_train.evaluate.finetune.tokens import Reader, cut

_MAX_SCORE = float(np.finfo(np.float32).max)
DIGITS = 6  # decimal places of a score in predictions.jsonl
NOTHING = {"prediction": None, "scores": None}  # entry of a text without a document


class _OfTexts(Kind):
    """The methods of `Kind` that the three kinds below share."""

    name: str  # objective.kind

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """See `Kind`: a text, or several with [SEP] between."""
        ids_of_texts = reader.ids(split.examples, [example.texts for example in split.examples])
        for text_ids, example, value in zip(ids_of_texts, split.examples, values, strict=True):
            entry = {"label": self.in_words(value, labels.all_names(split.key))} if split.labelled else {}
            if not any(text_ids) or not any(text.strip() for text in example.texts):
                yield Encoded((), entry)
                continue
            between = reader.vocabulary.between
            added = len(between) * (len(text_ids) - 1)
            kept = cut(text_ids, reader.text_tokens - added)
            ids = [token for number, part in enumerate(kept) for token in (*between * (number > 0), *part)]
            counts.truncated += len(ids) < sum(map(len, text_ids)) + added
            counts.unseen += self.is_unseen(value, len(labels.names))
            yield Encoded([(ids, value)], entry)

    def only_label(self, values: NDArray[Any]) -> str | None:
        """See `Kind`."""
        return "one class" if len(np.unique(values)) == 1 else None

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """See `Kind`."""
        segments = 2 if types and len(task.text_columns) > 1 else 1
        own = {"name": "classify", "kind": self.name, "labels": list(labels), "pooling": pooling(task, model)}
        return own | {"segments": segments}

    def predicted(self, texts: Sequence[Mapping[str, Any]], logits: Logits, objective: Any) -> Iterator[dict[str, Any]]:
        """See `Kind`."""
        for text in texts:
            number = text["document"]
            yield dict(NOTHING) if number is None else self.predicted_of(logits[number], objective.labels)

    def in_words(self, value: NDArray[Any], names: Sequence[str]) -> Any:
        """Return the label of a text in the form of predictions.jsonl."""
        return names[int(value[0, 0])]

    def is_unseen(self, value: NDArray[Any], num_classes: int) -> bool:
        """True if the class of a text is missing in training."""
        return False

    def predicted_of(self, logits_L: Logits, names: Sequence[str]) -> dict[str, Any]:
        """Return the prediction and scores of one text."""
        raise NotImplementedError


class OneClass(_OfTexts):
    """One class of each text; see `Kind`."""

    name, min_classes = "single-label", 2

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        yield from super().problems(task)
        if "f1" in task.metrics and len(task.labels) != 2:
            yield f"metrics: f1 measures the second of two labels, and labels={task.labels}. Name two, or use macro_f1."

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`."""
        return number_classes(self, task, splits)

    def classes(self, example: Example, task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
        """See `ByClass`."""
        return named_classes(example, [example.label], task, names)

    def ordered(self, names: Sequence[str], task: TaskConfig) -> tuple[str, ...]:
        """See `ByClass`."""
        return in_order(names)

    def value(self, numbers: Sequence[int], width: int) -> NDArray[np.int32]:
        """See `ByClass`."""
        return np.array([numbers], dtype=np.int32)

    def unread(self, example: Example, width: int) -> NDArray[np.int32]:
        """See `ByClass`."""
        return np.zeros((1, 1), dtype=np.int32)

    def is_unseen(self, value: NDArray[Any], num_classes: int) -> bool:
        """True if the class of a text is missing in training."""
        return bool((value >= num_classes).any())

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """See `Kind`."""
        from modernbert_train.evaluate.metrics import class_figures

        return class_figures(outputs.logits, np.concatenate(outputs.labels)[:, 0], outputs.settings.metrics)

    def predicted_of(self, logits_L: Logits, names: Sequence[str]) -> dict[str, Any]:
        """See `_OfTexts`."""
        shares = dict(zip(names, rounded(logits_L.softmax(dim=0)), strict=True))
        return {"prediction": names[int(logits_L.argmax())], "scores": shares}

    def submit_problems(self, part: SubmitConfig, classes: Sequence[str]) -> Iterator[str]:
        """See `Kind`."""
        yield from class_problems(part, classes)

    def submitted(self, prediction: Any, part: SubmitConfig, classes: Sequence[str]) -> str:
        """See `Kind`."""
        return class_value(prediction, part, classes)


class SeveralClasses(OneClass):
    """Any number of classes of each text; see `Kind`."""

    name, min_classes = "multi-label", 1
    link = "sigmoid"

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        return _OfTexts.problems(self, task)

    def only_label(self, values: NDArray[Any]) -> str | None:
        """See `Kind`."""
        return None

    def classes(self, example: Example, task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
        """See `ByClass`: a list, or text with a separator."""
        with values_as(DataError, example.place):
            values = listed_classes(example.label, task.label_column, task.label_separator)
        return named_classes(example, values, task, names)

    def value(self, numbers: Sequence[int], width: int) -> NDArray[np.int32]:
        """See `ByClass`: a 0 or 1 for each class."""
        hot = self.unread(None, width)
        hot[0, numbers] = 1
        return hot

    def unread(self, example: Example | None, width: int) -> NDArray[np.int32]:
        """See `ByClass`."""
        return np.zeros((1, width), dtype=np.int32)

    def in_words(self, value: NDArray[Any], names: Sequence[str]) -> Any:
        """See `_OfTexts`."""
        return [names[number] for number in np.flatnonzero(value[0]).tolist()]

    def is_unseen(self, value: NDArray[Any], num_classes: int) -> bool:
        """See `_OfTexts`."""
        return bool(value[0, num_classes:].any())

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """See `Kind`."""
        from modernbert_train.evaluate.metrics import several_figures

        return several_figures(outputs.logits, np.concatenate(outputs.labels), outputs.settings.metrics)

    def predicted_of(self, logits_L: Logits, names: Sequence[str]) -> dict[str, Any]:
        """See `_OfTexts`."""
        above = [name for name, logit in zip(names, logits_L.tolist(), strict=True) if logit > 0]
        return {"prediction": above, "scores": dict(zip(names, rounded(logits_L.sigmoid()), strict=True))}

    def submit_problems(self, part: SubmitConfig, classes: Sequence[str]) -> Iterator[str]:
        """See `Kind`: a text may have several classes."""
        return Kind.submit_problems(self, part, classes)


class Score(_OfTexts):
    """Regression: a number for each text; see `Kind`."""

    name = "regression"
    link = "identity"
    repeats = False  # annotators may score the same text differently

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        yield from super().problems(task)
        if task.labels:
            yield f"labels={task.labels}: a score has none. Remove them."

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`."""
        values: dict[str, list[NDArray[Any]]] = {
            name: [_score(each) if split.labelled else np.zeros((1, 1), dtype=np.float32) for each in split.examples]
            for name, split in splits.items()
        }
        if len({float(each[0, 0]) for each in values[TRAIN]}) < 2:
            raise DataError(f"{splits[TRAIN].source}: all scores are equal, so there is nothing to learn. Give others.")
        return Labels((), {}, values)

    def only_label(self, values: NDArray[Any]) -> str | None:
        """See `Kind`."""
        return "one score" if len(np.unique(values)) == 1 else None

    def in_words(self, value: NDArray[Any], names: Sequence[str]) -> Any:
        """See `_OfTexts`."""
        return float(value[0, 0])

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """See `Kind`."""
        from modernbert_train.evaluate.metrics import score_figures

        return score_figures(outputs.logits, np.concatenate(outputs.labels)[:, 0], outputs.settings.metrics)

    def predicted_of(self, logits_L: Logits, names: Sequence[str]) -> dict[str, Any]:
        """See `_OfTexts`."""
        (score,) = rounded(logits_L)
        return {"prediction": score, "scores": {"score": score}}

    def submit_problems(self, part: SubmitConfig, classes: Sequence[str]) -> Iterator[str]:
        """See `Kind`."""
        yield from score_problems(part)

    def submitted(self, prediction: Any, part: SubmitConfig, classes: Sequence[str]) -> str:
        """See `Kind`."""
        return score_value(prediction, part)


def pooling(task: TaskConfig, model: ModelConfig) -> str:
    """Return the default pooling of a classifier."""
    return task.pooling or ("mean" if task.freeze else model.pooling)


def rounded(values: Logits) -> list[float]:
    """Return scores, rounded as in predictions.jsonl."""
    return [round(value, DIGITS) for value in values.tolist()]


def listed_classes(value: Any, column: str, separator: str) -> list[Any]:
    """Return the values of a list of classes, or of a text with separators.

    Raises:
        ValueError: it is neither, a list that was written as text, or multi-hot: a 0 or 1 for each class.
    """
    if isinstance(value, str):
        if value.strip().startswith("[") and value.strip().endswith("]"):  # pandas writes lists this way into a .csv
            raise ValueError(
                f"{column} is {shown_value(value)}, a list that was written as text. Write the classes with "
                f"{separator!r} between them, or lists into a .jsonl or .parquet."
            )
        return [type(value)(part.strip()) for part in value.split(separator) if part.strip()]
    if type(value) is int:
        return [value]
    if not isinstance(value, list):
        raise ValueError(
            f"{column} is {shown_value(value)}, and not the classes of a text. Write a list of them, or a text with "
            f"{separator!r} between them; [] is none."
        )
    if len({*map(str, value)}) < len(value) and all(isinstance(each, int | float) and each in (0, 1) for each in value):
        raise ValueError(
            f"{column} is {shorten(str(value), 40)}, a 0 or 1 for each class. Write the list of the classes that a "
            "text has, such as the places of the ones: jq -c '.LABEL |= [to_entries[] | select(.value == 1 or .value "
            f"== true) | .key]', with {column} for LABEL."
        )
    return value


def _score(example: Example) -> NDArray[np.float32]:
    value = example.label
    score = number_in(value)
    if not abs(score) <= _MAX_SCORE:  # NaN is not either
        raise DataError(
            f"{example.place}: {shown_value(value)} is no score. Write a finite number that float32 holds, or leave it "
            "out."
        )
    return np.array([[score]], dtype=np.float32)
