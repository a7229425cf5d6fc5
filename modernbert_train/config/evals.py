"""Evaluations during training, besides the held-out text: keys that all of them have, and a dataclass for each kind.

Another kind is one more here, a row in schema.VARIANTS, one in evaluators.EVALUATORS, and a file in evaluate/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from omegaconf import MISSING

from modernbert_train.config.knob import knob

# of the names of figures, which are free otherwise
BASELINE = "baseline/"  # before the name of a figure: what is reached without looking at the text
BITS_PER_BYTE = "bits_per_byte"  # loss of a byte of held-out text, for runs with other tokenizers
TEMPERATURE = "contrastive/temperature"  # of held-out pairs, where it is learnt
COUNT = "num_"  # begins the name of what only counts, which no curve is drawn of


@dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """Keys that every measurement has."""

    name: str = MISSING
    # measured every so many tokens of the run, and at the end of each phase; None: at the end of each phase
    every_tokens: int | None = knob(None, above=0)


@dataclass(frozen=True, kw_only=True)
class ProbeConfig(EvaluatorConfig):
    """What a simple classifier can tell from the frozen encoder's mean-pooled embeddings; see docs/watching.md."""

    name: str = "probe"
    # labelled texts to learn from: .jsonl with one object a line, or .tsv or .csv with the names of columns first
    train: str = knob(local=True)
    # texts to classify, of the same form; None: those of `train`, each by a classifier that has not seen its fold
    test: str | None = knob(None, local=True)
    # columns with text; several are one sequence, [SEP] between them
    text_columns: list[str] = knob(factory=lambda: ["text"])
    label_column: str = "label"  # column with the class: a text, a whole number, or true and false
    # linear: logistic regression; nearest: the class of the nearest text, by cosine
    classifier: Literal["linear", "nearest"] = "linear"
    pooling: Literal["mean"] = "mean"  # a text's embedding: the mean over its tokens, [CLS] and [SEP] included
    # most texts taken of each file, drawn by `seed`; None: all
    max_examples: int | None = knob(2000, low=4, why="since two classes need two texts each")
    folds: int = knob(
        5, low=2, why="since each part is classified by what was learned from the others"
    )  # without `test`
    seed: int = knob(0, low=0, below=1 << 63)  # of the texts that are drawn, and of the folds


@dataclass(frozen=True, kw_only=True)
class ScoresConfig(EvaluatorConfig):
    """How the classes or scores that a fine-tuned model tells agree with those of labelled texts."""

    name: str = "scores"
    shards: str = knob(local=True)  # labelled shards, as `finetune` writes them
    metrics: list[str] = knob(factory=lambda: ["accuracy"])  # see docs/finetuning.md
    # classes there that are none of objective.labels, in the order of their numbers after those
    unseen: list[str] = knob(factory=list)


@dataclass(frozen=True, kw_only=True)
class OtherTextConfig(EvaluatorConfig):
    """The objective's loss and accuracy on another held-out text than data.validation, such as that of one stream."""

    name: str = "text"
    shards: str = knob(local=True)  # held-out shards; eval.max_tokens and eval.row_tokens hold for them too


_Kind = TypeVar("_Kind", bound=EvaluatorConfig)


def of_kind(evals: Mapping[str, EvaluatorConfig], kind: type[_Kind]) -> dict[str, _Kind]:
    """Those measurements of a run that are of one kind, by name."""
    return {name: each for name, each in evals.items() if isinstance(each, kind)}
