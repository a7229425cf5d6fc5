"""Token classification: sentences as lists of words, each word with a tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import ModelConfig
from modernbert_train.config.task_kinds import SPANS
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import ending
from modernbert_train.data.read.conll import TAGS, WORDS, loose_tags, require_span_tag, token_lists
from modernbert_train.data.read.task_rows import TaskRow, rows_of
from modernbert_train.evaluate.finetune.classes import NOTHING, rounded
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import Encoded, Example, Split, by_place
from modernbert_train.evaluate.finetune.kinds import Kind
from modernbert_train.evaluate.finetune.numbers import Labels, Logits, Outputs, in_order, number_classes
from modernbert_train.evaluate.finetune.tokens import Reader


class Words(Kind):
    """See `Kind`."""

    ends: tuple[str, ...] = (".conll", ".jsonl", ".parquet", ".txt")
    min_classes = 2

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        if len(task.text_columns) != 1:
            yield f"text_columns={task.text_columns}: for words name one column."

    def columns(self, task: TaskConfig, labelled: bool) -> tuple[list[str], list[str]]:
        """See `Kind`."""
        return [], [task.word_column, *([task.tag_column] if labelled else [])]

    def rows(self, path: Path, task: TaskConfig, labelled: bool, named: str | None) -> Iterator[TaskRow]:
        """See `Kind`. The columns of a CoNLL file have no names: a text is its words."""
        if ending(path) in (".jsonl", ".parquet"):
            yield from super().rows(path, task, labelled, named)
            return
        for row in rows_of(path, "conll", [WORDS, *([TAGS] if labelled else [])]):
            values = [*([row.value(TAGS)] if labelled else []), *([None] if named else [])]
            yield TaskRow(row.line, tuple(row.value(WORDS)), tuple(values))

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`; a tag that is a whole number is the index of its class."""
        where = example.place.rpartition(": ")[2]
        words, tags = example.texts, example.label
        if not words:
            words, tags = token_lists(
                (others[0], tags), (task.word_column, task.tag_column if labelled else None), where
            )
        if not labelled:
            return example._replace(texts=words)
        numbers = tuple(by_place(example, tag, tuple(task.labels) or names) for tag in tags)
        for number, tag in enumerate(numbers) if task.spans else ():
            require_span_tag(tag, f"line {example.line + number}" if example.texts else where)
        return example._replace(texts=words, label=numbers)

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`."""
        return number_classes(self, task, splits)

    def classes(self, example: Example, task: TaskConfig, names: Sequence[str]) -> tuple[str, ...]:
        """See `ByClass`: one for each word."""
        return tuple(example.label)

    def ordered(self, names: Sequence[str], task: TaskConfig) -> tuple[str, ...]:
        """See `ByClass`: the tag outside of entities comes first."""
        return tuple(sorted(in_order(names), key=lambda each: each != "O"))

    def value(self, numbers: Sequence[int], width: int) -> NDArray[np.int32]:
        """See `ByClass`."""
        return np.array(numbers, dtype=np.int32)

    def unread(self, example: Example, width: int) -> NDArray[np.int32]:
        """See `ByClass`."""
        return np.zeros(len(example.texts), dtype=np.int32)

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """See `Kind`: the words with a space between each; the first token of a word has its tag."""
        names = labels.all_names(split.key)
        for example, value in zip(split.examples, values, strict=True):
            entry: dict[str, Any] = {"label": [names[number] for number in value]} if split.labelled else {}
            if split.labelled and reader.task.spans:
                counts.loose_tags += loose_tags(example.label)
            ids, firsts = _tokens(example, reader)
            if not ids or not any(text.strip() for text in example.texts):
                yield Encoded((), entry)
                continue
            kept = ids[: reader.text_tokens]
            of_kept = _of_tokens(value, firsts, len(kept))
            counts.lost_words += len(firsts) - int((of_kept != IGNORED_LABEL).sum())
            counts.truncated += len(kept) < len(ids)
            counts.unseen += bool((of_kept >= len(labels.names)).any())
            yield Encoded([(kept, of_kept)], entry | {"told": [0 <= first < len(kept) for first in firsts]})

    def objective(self, task: TaskConfig, model: ModelConfig, labels: tuple[str, ...], types: bool) -> dict[str, Any]:
        """See `Kind`."""
        return {"name": "tag", "labels": list(labels)}

    def figures(self, outputs: Outputs) -> dict[str, float]:
        """See `Kind`; spans are read only if a metric needs them, since not all tags mark spans."""
        from modernbert_train.evaluate.metrics import class_figures, entity_figures

        labels_W = np.concatenate([each[each != IGNORED_LABEL] for each in outputs.labels])
        metrics = outputs.settings.metrics
        spans = [name for name in metrics if name.startswith(SPANS)]
        figures = class_figures(outputs.logits, labels_W, [name for name in metrics if name not in spans])
        if spans:
            names, ends = [*outputs.objective.labels, *outputs.settings.unseen], np.cumsum(outputs.sizes)[:-1]
            tags = [
                [[names[tag] for tag in each] for each in np.split(values, ends)]
                for values in (outputs.logits.argmax(dim=1).numpy(), labels_W)
            ]
            finite = bool(outputs.logits.isfinite().all())
            of_spans = entity_figures(*tags)
            figures |= {name: of_spans[name] if finite else float("nan") for name in spans}
        return {name: figures[name] for name in ("loss", *metrics)} | figures

    def predicted(self, texts: Sequence[Mapping[str, Any]], logits: Logits, objective: Any) -> Iterator[dict[str, Any]]:
        """See `Kind`."""
        names, at = objective.labels, 0
        for text in texts:
            if text["document"] is None:
                yield dict(NOTHING)
                continue
            number = sum(text["told"])
            chances, tags = logits[at : at + number].softmax(dim=1).max(dim=1)
            at += number
            tag_chances = iter(zip((names[tag] for tag in tags.tolist()), rounded(chances), strict=True))
            words = [next(tag_chances) if told else (None, None) for told in text["told"]]
            yield {"prediction": [tag for tag, _ in words], "scores": [chance for _, chance in words]}


def _of_tokens(values: NDArray[np.int32], firsts: Sequence[int], tokens: int) -> NDArray[np.int32]:
    """Return labels at the first token of each word, if not cut off; -1 in `firsts` is a word without tokens."""
    labels = np.full(tokens, IGNORED_LABEL, dtype=np.int32)
    for value, first in zip(values, firsts, strict=True):
        if 0 <= first < tokens:
            labels[first] = value
    return labels


def _tokens(example: Example, reader: Reader) -> tuple[list[int], list[int]]:
    """Return a sentence's token ids and the index of each word's first token; -1 for a word without one."""
    encoding = reader.tokenizer.encode(" ".join(example.texts), add_special_tokens=False)
    firsts: list[int] = []
    at = token = 0
    for word in example.texts:
        while token < len(encoding.offsets) and encoding.offsets[token][1] <= at:
            token += 1
        begins = token < len(encoding.offsets) and encoding.offsets[token][0] < at + len(word)
        firsts.append(token if begins and token not in firsts[-1:] else -1)
        at += len(word) + 1
    return encoding.ids, firsts
