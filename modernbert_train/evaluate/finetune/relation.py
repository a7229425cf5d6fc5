"""Classify the relation of two marked spans of a text, such as `<e1>Bill</e1> was born in <e2>Seattle</e2>`.

The marks become punctuation that any tokenizer has, `@ Bill @ was born in # Seattle #`, and the class is learned as for
any text (Zhou & Chen 2021, arXiv:2102.01373). A text that is too long is cut around its spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.classes import OneClass
from modernbert_train.evaluate.finetune.counts import Counts
from modernbert_train.evaluate.finetune.examples import TRAIN, Encoded, Example, Split
from modernbert_train.evaluate.finetune.numbers import Labels
from modernbert_train.evaluate.finetune.tokens import Reader

_MARKS = {"<e1>": "@", "</e1>": "@", "<e2>": "#", "</e2>": "#"}
_NO_RELATION = ("no_relation", "Other", "NA", "none")  # its names in TACRED, SemEval 2010, NYT and others


class Relation(OneClass):
    """See `Kind`: single-label classification, except for the marks."""

    def problems(self, task: TaskConfig) -> Iterator[str]:
        """See `Kind`."""
        yield from super().problems(task)
        if len(task.text_columns) != 1:
            yield f"text_columns={task.text_columns}: name the one column with the marked text."

    def example(
        self, example: Example, others: tuple[Any, ...], task: TaskConfig, names: Sequence[str], labelled: bool
    ) -> Example:
        """See `Kind`; each mark must occur once, around some text."""
        text = example.texts[0]
        if not all(
            text.count(f"<e{n}>") == text.count(f"</e{n}>") == 1 and re.search(rf"<e{n}>.*\S.*</e{n}>", text, re.DOTALL)
            for n in (1, 2)
        ):
            where = example.place.rpartition(": ")[2]
            raise ValueError(f"{where}: the spans are not marked. Write <e1>...</e1> and <e2>...</e2>, each once.")
        return example

    def ordered(self, names: Sequence[str], task: TaskConfig) -> tuple[str, ...]:
        """See `ByClass`: the class without a relation comes first."""
        return tuple(sorted(super().ordered(names, task), key=lambda each: each not in _NO_RELATION))

    def numbers(self, task: TaskConfig, splits: Mapping[str, Split]) -> Labels:
        """See `Kind`."""
        labels = super().numbers(task, splits)
        if "relation_f1" in task.measured and not task.labels and labels.names[0] not in _NO_RELATION:
            raise DataError(
                f"{splits[TRAIN].source}: relation_f1 leaves out the class without a relation, and none is called "
                f"{', '.join(_NO_RELATION)}. Name all classes in labels, that one first, or set metrics=[macro_f1]."
            )
        return labels

    def encode(
        self, split: Split, values: Sequence[Any], labels: Labels, reader: Reader, counts: Counts
    ) -> Iterator[Encoded]:
        """See `Kind`."""
        for example, value in zip(split.examples, values, strict=True):
            record = {"label": self.in_words(value, labels.all_names(split.key))} if split.labelled else {}
            text, first, last = _marked(example.texts[0])
            encoding = reader.tokenizer.encode(text, add_special_tokens=False)
            inside = [n for n, (begin, end) in enumerate(encoding.offsets) if end > first and begin < last] or [0]
            room = reader.text_tokens - len(inside)  # for tokens around the spans
            start = min(max(0, inside[0] - max(0, room) // 2), max(0, len(encoding.ids) - reader.text_tokens))
            start = start if room > 0 else inside[0]
            ids = encoding.ids[start : start + reader.text_tokens]
            counts.truncated += len(ids) < len(encoding.ids)
            counts.unseen += self.is_unseen(value, len(labels.names))
            yield Encoded([(ids, value)], record)


def _marked(text: str) -> tuple[str, int, int]:
    """Return the text with punctuation for its marks, and the range of characters between the outer marks."""
    words = " ".join(re.sub("|".join(_MARKS), lambda mark: f" {mark[0]} ", text).split()).split(" ")
    positions = [number for number, word in enumerate(words) if word in _MARKS]
    written = [_MARKS.get(word, word) for word in words]
    before, until = (len(" ".join(written[:position])) for position in (positions[0], positions[-1] + 1))
    return " ".join(written), before, until
