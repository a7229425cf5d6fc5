"""Evaluations during training, besides the held-out text: common keys, and a dataclass for each kind.

A new kind is a dataclass here, a row in schema.VARIANTS, one in evaluators.EVALUATORS, and a file in evaluate/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from omegaconf import MISSING

from modernbert_train.config.classify import LabelledConfig
from modernbert_train.config.knob import knob
from modernbert_train.config.objective import ObjectiveConfig
from modernbert_train.config.task_kinds import KINDS, KindName, metrics_of_objective
from modernbert_train.core.files import TABLE_ENDS, ending

# parts of metrics' names with a meaning
BASELINE = "baseline/"  # prefix: the score without looking at the text
BITS_PER_BYTE = "bits_per_byte"  # loss per byte of held-out text, to compare runs with different tokenizers
TEMPERATURE = "contrastive/temperature"  # for held-out pairs, if it is learnt
COUNT = "num_"  # prefix of counts, of which no curve is drawn


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """Keys of every evaluation.

    Attributes:
        texts: "package.module:name" of a function of (key, settings), without torch, that reads the texts of this
            evaluation and returns a description, or raises DataError; called before a run starts. None: reads no texts.
    """

    texts: ClassVar[str | None] = None

    name: str = MISSING
    # measured at this interval in tokens, and at the end of each phase; None: only at the end of each phase
    every_tokens: int | None = knob(None, above=0)

    def mistakes(self, here: str, objective: ObjectiveConfig) -> Iterator[str]:
        """Yield a message for every impossible combination of these keys, among themselves and with the objective.

        Args:
            here: dotted key of the evaluation, for the messages.
            objective: of the run.
        """
        yield from ()


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(EvaluatorConfig):
    """Accuracy of a simple classifier on the frozen encoder's mean-pooled embeddings; see docs/watching.md."""

    texts: ClassVar[str | None] = "modernbert_train.evaluate.probe_texts:describe_texts"

    name: str = "probe"
    kind: KindName = "single-label"  # of labels, as in a task of `finetune`; also multi-label and regression
    # labelled texts for training: .jsonl with one object a line, or .tsv or .csv with a header line
    train: str = knob(local=True)
    # texts to classify, in the same form; None: the texts of `train`, each by a classifier that has not seen its fold
    test: str | None = knob(None, local=True)
    # columns with text; several are joined to one sequence, with [SEP] between them
    text_columns: list[str] = knob(factory=lambda: ["text"])
    label_column: str = "label"  # column with the class (a text, whole number, true or false), classes or score
    # linear: logistic regression, or ridge regression for scores; nearest: the label of the nearest text, by cosine
    classifier: Literal["linear", "nearest"] = "linear"
    pooling: Literal["mean"] = "mean"  # a text's embedding: the mean over its tokens, [CLS] and [SEP] included
    # maximum number of texts from each file, drawn by `seed`; None: all
    max_examples: int | None = knob(2000, low=4, why="since two classes need two texts each")
    folds: int = knob(5, low=2, why="since each fold is classified by a probe trained on the others")  # without `test`
    seed: int = knob(0, low=0, below=1 << 63)  # for drawing texts and folds

    def mistakes(self, here: str, objective: ObjectiveConfig) -> Iterator[str]:
        """See `EvaluatorConfig`."""
        for key, file in (("train", self.train), ("test", self.test)):
            if file is not None and ending(Path(file)) not in TABLE_ENDS:
                yield f"{here}.{key}={file}: unknown kind of file. Name one of {', '.join(TABLE_ENDS)}."
        if self.test == self.train:
            yield (
                f"{here}.test={self.test} is also {here}.train: the probe would be tested on its training texts. "
                "Remove test, so that each text is classified by a probe trained on the other folds."
            )
        if not KINDS[self.kind].probed:
            choices = ", ".join(kind for kind, row in KINDS.items() if row.probed)
            yield f"{here}.kind={self.kind}: a probe learns one label of each text. Choose from {choices}."
        if not self.text_columns:
            yield f"{here}.text_columns=[]: no text to read. Name the column of the text."
        if self.label_column in self.text_columns:
            yield (
                f"{here}.label_column={self.label_column} is also one of {here}.text_columns: the text would contain "
                "its class. Name another."
            )


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(EvaluatorConfig):
    """Agreement of a fine-tuned model's classes or scores with labelled texts."""

    name: str = "scores"
    shards: str = knob(local=True)  # labelled shards, as `finetune` writes them
    metrics: list[str] = knob(factory=lambda: ["accuracy"])  # see docs/finetuning.md
    # classes of these texts that are missing in objective.labels; they are numbered after those, in this order
    unseen: list[str] = knob(factory=list)

    def mistakes(self, here: str, objective: ObjectiveConfig) -> Iterator[str]:
        """See `EvaluatorConfig`."""
        if not isinstance(objective, LabelledConfig):
            yield (
                f"{here}.name=scores with objective.name={objective.name}: it predicts no labels. Set "
                f"{here}.name=probe."
            )
            return
        choices = metrics_of_objective(objective.task_kind)
        for metric in self.metrics:
            if metric not in choices:
                yield f"{here}.metrics: {metric} is not a metric of this objective. Choose from {', '.join(choices)}."
        if "f1" in self.metrics and len(objective.labels) != 2:
            yield f"{here}.metrics: f1 is for the second of two classes, and there are {len(objective.labels)}."


@dataclass(frozen=True, kw_only=True)
class HeldoutStreamConfig(EvaluatorConfig):
    """The objective's loss and accuracy on another held-out text than data.validation, such as one stream's."""

    name: str = "text"
    shards: str = knob(local=True)  # held-out shards; eval.max_tokens and eval.row_tokens apply to them too

    def mistakes(self, here: str, objective: ObjectiveConfig) -> Iterator[str]:
        """See `EvaluatorConfig`."""
        if objective.is_labelled:
            yield f"{here}.name=text: objective.name={objective.name} predicts no tokens. Remove it."


_Kind = TypeVar("_Kind", bound=EvaluatorConfig)


def of_kind(evals: Mapping[str, EvaluatorConfig], kind: type[_Kind]) -> dict[str, _Kind]:
    """Return the evaluations of one kind, by name."""
    return {name: each for name, each in evals.items() if isinstance(each, kind)}
