"""Read the texts of a probe, number their labels, draw a sample, and divide it into folds.

Works without torch, so `check` reports the same errors as `train`; keyed, so every start draws the same texts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import ProbeConfig
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.keyed_random import derive, permutation
from modernbert_train.core.text import plural, some
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.examples import TRAIN, Split
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.numbers import Labels
from modernbert_train.evaluate.finetune.read_texts import read_file

ONLY_LEARNED = -1  # part of a text that is used for training only
_TEST = "test"
_DRAWN, _FOLDS = 1, 2


@dataclass(frozen=True)
class ProbeTexts:
    """Labelled texts of a probe.

    Attributes:
        task: settings that the kind reads.
        split: all texts, first of `train`, then of `test`.
        labels: their labels as numbers.
        parts_N: int64. The texts of part 0, 1, ... are predicted by a model trained on all others.
        empty: number of texts without a letter, which were left out.
    """

    task: TaskConfig
    split: Split
    labels: Labels
    parts_N: NDArray[np.int64]
    empty: int

    def __str__(self) -> str:
        learned, classes = int((self.parts_N == ONLY_LEARNED).sum()), len(self.labels.names)
        about = f"of {classes:,} classes" if classes else "with scores"
        split = f", {len(self.parts_N) - learned:,} of them to be predicted" if learned else ""
        left_out = f"; {plural(self.empty, 'empty text')} left out" if self.empty else ""
        return f"{len(self.parts_N):,} texts {about}{split}{left_out}"


def describe_texts(key: str, settings: ProbeConfig) -> str:
    """Return the numbers of a probe's texts. Raises as `read_texts`."""
    return str(read_texts(key, settings))


def read_texts(key: str, settings: ProbeConfig) -> ProbeTexts:
    """Read the texts of a probe, draw and divide them.

    Args:
        key: key in the configuration, evals.NAME, for messages.
        settings: its section.

    Raises:
        DataError: a file is missing, damaged or lacks a column, or its labels cannot be learned from it.
    """
    files = {TRAIN: settings.train} | ({} if settings.test is None else {_TEST: settings.test})
    task = TaskConfig(
        kind=settings.kind,
        train=settings.train,
        text_columns=settings.text_columns,
        label_column=settings.label_column,
    )
    drawn = {name: _drawn(f"{key}.{name}", file, task, settings) for name, file in files.items()}
    splits = {name: split for name, (split, _) in drawn.items()}
    kind, learned = kind_of(task.kind), splits[TRAIN]
    labels = kind.numbers(task, splits)
    if labels.unseen:
        raise DataError(
            f"{splits[_TEST].source}: has classes ({some(labels.unseen[_TEST])}) that none of the "
            f"{len(learned.examples):,} texts taken from {learned.source} has. Raise {key}.max_examples, or remove "
            "those texts."
        )
    if (names := sorted(labels.names)) != [*labels.names]:  # the order of classes when probes read class names only
        labels = kind.numbers(replace(task, labels=names), splits)
    values = labels.values[TRAIN]
    parts_N = np.full(len(values), ONLY_LEARNED)
    if _TEST in splits:
        test = splits[_TEST]
        if (only := kind.only_label(np.concatenate(labels.values[_TEST]))) is not None:
            raise DataError(f"{test.source}: {plural(len(test.examples), 'text')}, all of {only}. Give others.")
        parts_N = np.concatenate([parts_N, np.zeros(len(test.examples), dtype=np.int64)])
    else:
        if kind.link == "softmax":
            _require_two(key, learned, labels)
        order = permutation(len(values), derive(settings.seed, _FOLDS))
        dealt = sorted(range(len(values)), key=lambda number: (values[number].tolist(), order[number]))
        parts_N[dealt] = np.arange(len(values)) % settings.folds  # folds get about equally many texts of each label
    pooled = replace(learned, examples=[example for split in splits.values() for example in split.examples])
    together = [value for name in splits for value in labels.values[name]]
    return ProbeTexts(
        task, pooled, replace(labels, values={TRAIN: together}), parts_N, sum(empty for _, empty in drawn.values())
    )


def _require_two(key: str, split: Split, labels: Labels) -> None:
    counts = Counter(value.item() for value in labels.values[TRAIN])
    if single := [name for number, name in enumerate(labels.names) if counts[number] < 2]:
        raise DataError(
            f"{split.source}: {len(single):,} of {len(labels.names):,} classes have a single text among the "
            f"{len(split.examples):,} taken ({some(single)}), which cannot be used for both training and testing. "
            f"Raise {key}.max_examples, give more texts, or name others in {key}.test."
        )


def _drawn(key: str, file: str, task: TaskConfig, settings: ProbeConfig) -> tuple[Split, int]:
    """Draw texts of a file, in their order, and count the empty ones."""
    read = read_file(key, Path(file), task, source=f"{key}={file}")
    with_text = [each for each in read.examples if any(text.strip() for text in each.texts)]
    empty = len(read.examples) - len(with_text)
    if settings.max_examples is not None and len(with_text) > settings.max_examples:
        order = permutation(len(with_text), derive(settings.seed, _DRAWN))
        with_text = [with_text[number] for number in np.sort(order[: settings.max_examples])]
    return replace(read, examples=with_text), empty
