"""Extractive question answering, from SQuAD's JSON or from tables with transformers' columns.

A document is a question, [SEP] and a window of its context; windows overlap. The targets are the answer's first and
last token in windows that contain all of it, and [CLS] in all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.evals import COUNT
from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import ending
from modernbert_train.core.text import shown_value
from modernbert_train.data.read.task_rows import TaskRow, json_of
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.classes import DIGITS
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import TRAIN, Encoded, Example, Split
from modernbert_train.evaluate.finetune.kinds import Kind
from modernbert_train.evaluate.finetune.numbers import Labels, Logits, Outputs
from modernbert_train.evaluate.finetune.tokens import Reader
from modernbert_train.evaluate.label_sidecar import read_texts

SQUAD = ".json"
_NONE, _UNKNOWN = -1, -2  # for character offsets: no answer; an answer that is not at answer_start


class Span(NamedTuple):
    """An answer, and the index of its first character in the context."""

    text: str
    start: int


class Answers(Kind):
    """See `Kind`."""

    ends: tuple[str, ...] = (SQUAD, ".jsonl", ".parquet")
    decides: tuple[str, ...] = ("unanswerable", "overlap_tokens")

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        if task.text_columns != ["text"] and len(task.text_columns) != 2:
            yield f"text_columns={task.text_columns}: name the columns of the question and of its context."
        if task.labels:
            yield f"labels={task.labels}: answers are no classes. Remove them."
        if not 0 <= task.overlap_tokens < task.max_tokens:
            yield f"overlap_tokens={task.overlap_tokens}: from 0, and below max_tokens={task.max_tokens}."
        for name in task.metrics:
            if "_answer_" in name and not task.unanswerable:
                yield f"metrics: {name} is for questions that may have no answer. Set unanswerable=true, or remove it."

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """See `Kind`."""
        texts = ["question", "context"] if task.text_columns == ["text"] else task.text_columns
        return texts, [_label_column(task)] if labelled else []

    def rows(self, path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[TaskRow]:
        """See `Kind`; the line of SQuAD's JSON is the number of the question."""
        if ending(path) != SQUAD:
            yield from super().rows(path, task, labelled, named)
            return
        content = json_of(path)
        try:
            questions = [
                (each["context"], question)
                for article in content["data"]
                for each in article["paragraphs"]
                for question in each["qas"]
            ]
            for number, (context, question) in enumerate(questions, start=1):
                if not isinstance(context, str) or not isinstance(question["question"], str):
                    raise ValueError(f"line {number}: the question or its context is no text. Correct it.")
                label = [[] if question.get("is_impossible") else question["answers"]] if labelled else []
                yield TaskRow(number, (question["question"], context), (*label, *([question["id"]] if named else [])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"is not as SQuAD's files are ({type(error).__name__}: {error}): data, paragraphs, qas with question, "
                "id and answers. Correct it, or give a .jsonl with question, context and answers."
            ) from None

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`; the label is the tuple of answers."""
        example = example._replace(texts=(example.texts[0].lstrip(), example.texts[1]))
        if not labelled:
            return example
        where = example.place.rpartition(": ")[2]
        spans = _spans(example.label, f"{where}: {_label_column(task)}")
        if not spans and not task.unanswerable:
            raise ValueError(
                f"{where}: has no answer, and every question of SQuAD 1 has. Set unanswerable=true where contexts may "
                "hold none, as in SQuAD 2; or leave it out. A split that hides its answers belongs under predict."
            )
        return example._replace(label=spans)

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`: the first and the last character of the first answer that the context has at `answer_start`."""
        values = {
            name: [_place(each) if split.labelled else np.full((1, 2), _UNKNOWN) for each in split.examples]
            for name, split in splits.items()
        }
        if not any(int(each[0, 0]) >= 0 for each in values[TRAIN]):
            raise DataError(
                f"{splits[TRAIN].source}: none of {len(values[TRAIN]):,} questions has an answer at the place where "
                "answer_start says, in characters of the context from 0. Correct the file."
            )
        return Labels(("start", "end"), {}, values)

    def encode(
        self, split: Split, values: Sequence[NDArray[Any]], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """See `Kind`. Measured splits also get the character offsets of each context."""
        ids_of_questions = reader.ids(split.examples, [example.texts[:1] for example in split.examples])
        context, encoding = "", reader.tokenizer.encode("", add_special_tokens=False)
        for (question,), example, value in zip(ids_of_questions, split.examples, values, strict=True):
            if example.texts[1] != context:  # consecutive questions often share a context
                context = example.texts[1]
                encoding = reader.tokenizer.encode(context, add_special_tokens=False)
            record: dict[str, Any] = {"label": [span.text for span in example.label]} if split.labelled else {}
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            question_ids = question[: reader.text_tokens // 2]
            between = reader.vocabulary.between
            room = reader.text_tokens - len(between) - len(question_ids)
            windows = list(_windows(len(offsets), room, reader.task.overlap_tokens))
            if split.key != TRAIN:
                record |= {"context": context, "starts": offsets[:, 0].tolist(), "ends": offsets[:, 1].tolist()}
                # a second separator counts as a question token
                record |= {"question_tokens": len(question_ids) + len(between) - 1, "windows": windows}
            lost = int(value[0, 0]) == _UNKNOWN and split.labelled
            counts.misplaced += lost
            if not context.strip() or not windows or (lost and split.key == TRAIN):
                yield Encoded((), record | {"windows": []}, "empty" if not lost else "")
                continue
            counts.truncated += len(question_ids) < len(question)
            head = [*question_ids, *between]
            span, before = _tokens(offsets, value[0]), 1 + len(head)  # [CLS], question and [SEP]
            documents = [
                ([*head, *encoding.ids[first : first + number]], _label(span, first, number, before))
                for first, number in windows
            ]
            yield Encoded(documents, record)

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """See `Kind`; transformers' classes lack dropout before the two logits."""
        own = {key: getattr(task, key) for key in ("unanswerable", "null_threshold", "max_answer_tokens")}
        return {"name": "answer", "segments": 2 if types else 1, "dropout": 0.0, **own}

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """See `Kind`; metrics are over questions, the loss is the mean over windows with a known answer."""
        from modernbert_train.evaluate.answer_spans import answer_figures, predicted_answers
        from modernbert_train.evaluate.metrics import finite, span_loss

        texts = read_texts(Path(outputs.settings.shards))
        predicted = [each.text for each in predicted_answers(texts, outputs.logits.numpy(), outputs.objective)]
        figures = answer_figures(
            predicted, [text["label"] for text in texts], unanswerable=outputs.objective.unanswerable
        )
        named = finite(outputs.logits, {name: figures[name] for name in outputs.settings.metrics})
        loss = span_loss(outputs.logits, outputs.labels, outputs.sizes)
        return {"loss": loss, **named, f"{COUNT}texts": float(len(texts))}

    def predicted(self, texts: Sequence[Mapping[str, Any]], logits: Logits, objective: Any) -> Iterator[dict[str, Any]]:
        """See `Kind`."""
        from modernbert_train.evaluate.answer_spans import predicted_answers

        for answer in predicted_answers(texts, logits.numpy(), objective):
            scores = {"answer": answer.score, "null": answer.null_score}
            rounded = {key: None if value is None else round(value, DIGITS) for key, value in scores.items()}
            yield {"prediction": answer.text, "start": answer.start, "scores": rounded}


def _label_column(task: TaskConfig) -> str:
    return "answers" if task.label_column == "label" else task.label_column


def _spans(value: Any, where: str) -> tuple[Span, ...]:
    """Parse answers: a list of objects, as in SQuAD, or an object of two lists, as in transformers."""
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise ValueError(
                f'{where} is not {{"text": [...], "answer_start": [...]}} with two lists of equal length. Correct it.'
            )
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        raise ValueError(f"{where} is {shown_value(value)}, not answers with text and answer_start. Correct it.")
    spans = []
    for each in value:
        text, start = (each.get("text"), each.get("answer_start")) if isinstance(each, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(start, int) or isinstance(start, bool):
            raise ValueError(f"{where} has an answer that lacks a text or an integer answer_start. Correct it.")
        spans.append(Span(text, start))
    return tuple(spans)


def _place(example: Example) -> NDArray[np.int64]:
    """Return the first and last character of an answer."""
    if not example.label:
        return np.full((1, 2), _NONE)
    for text, start in example.label:
        if text.strip() and start >= 0 and example.texts[1].startswith(text, start):
            blank = len(text) - len(text.lstrip())
            return np.array([[start + blank, start + len(text.rstrip()) - 1]])
    return np.full((1, 2), _UNKNOWN)


def _windows(tokens: int, room: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Yield first token and number of tokens of each window; together they cover all, neighbours share `overlap`."""
    step = max(room - overlap, room // 2, 1)
    for first in range(0, tokens, step):
        yield first, min(room, tokens - first)
        if first + room >= tokens:
            return


def _tokens(offsets: NDArray[np.int64], value: NDArray[np.int64]) -> tuple[int, int]:
    """Return the first and last token of an answer; (-1, -1): none; (-2, -2): unknown."""
    first, last = (int(each) for each in value)
    if first < 0:
        return first, last
    holding = np.flatnonzero((offsets[:, 1] > first) & (offsets[:, 0] <= last))
    return (int(holding[0]), int(holding[-1])) if len(holding) else (_UNKNOWN, _UNKNOWN)


def _label(span: tuple[int, int], first: int, number: int, before: int) -> NDArray[np.int32]:
    """Return the start and end of the answer in a window's sequence."""
    if span[0] == _UNKNOWN:
        return np.full((1, 2), IGNORED_LABEL, dtype=np.int32)
    if span[0] < first or span[1] >= first + number:
        return np.zeros((1, 2), dtype=np.int32)
    return np.array([[before + position - first for position in span]], dtype=np.int32)
