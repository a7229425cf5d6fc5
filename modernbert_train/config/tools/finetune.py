"""Every key of a fine-tuning task: its texts, its labels, and defaults for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from omegaconf import MISSING

from modernbert_train.config.classify import LoraConfig
from modernbert_train.config.knob import bound_mistakes, knob, rate_knob
from modernbert_train.config.task_kinds import KINDS, SPANS, KindName
from modernbert_train.core.text import is_plain_name

_SHRINKS = "since it is the share by which weights shrink in a step; usual are 1e-6 to 1e-5"


@dataclass(frozen=True, kw_only=True)
class LargeConfig:
    """Learning rate and epochs for models with a width of 1,024 or more."""

    lr: float | None = rate_knob(None)
    weight_decay: float | None = knob(None, low=0, below=1, why=_SHRINKS)
    epochs: float | None = knob(None, above=0)


@dataclass(frozen=True, kw_only=True)
class FrozenConfig:
    """Learning rate and epochs for a frozen encoder of any width: only one matrix is trained, and epochs are cheap."""

    lr: float = rate_knob(1e-3)
    weight_decay: float = knob(0.0, low=0, below=1, why=_SHRINKS)
    epochs: float = knob(10.0, above=0)  # frozen, 10 take about as long as 3 of the whole encoder


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(LoraConfig):
    """Low-rank adapters instead of all weights, and their learning rate."""

    lr: float = rate_knob(5e-4)  # adapters need about ten times the learning rate of all weights


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A task: labelled texts, their labels, and settings of the training."""

    # single-label: one class of each text; multi-label: any number of classes; regression: a score; tokens: a class of
    # each word; question-answering: a span of a context; multiple-choice: one of several texts; relation: a class of
    # two marked spans
    kind: KindName = MISSING
    # a dataset of the hub, or a folder with a file for each split; None: train and validation are files
    data: str | None = None
    subset: str | None = None  # of the dataset, if it has several; for a folder its subfolder, if it exists
    # split or file for training: .jsonl, .parquet, .tsv, .csv; for tokens .conll, for question-answering SQuAD's .json
    train: str = MISSING
    # splits or files for validation, by names of your choice
    validation: dict[str, str] = field(default_factory=dict)
    # splits or files that are only predicted, by names of your choice; labels are optional and ignored
    predict: dict[str, str] = field(default_factory=dict)
    # one, or two for pairs; for tokens the column with the list of words, by default `tokens`; for question-answering
    # question and context; for multiple-choice the text before [SEP] and the start of each choice
    text_columns: list[str] = field(default_factory=lambda: ["text"])
    # column with class, classes or score; for tokens with the list of tags, by default `tags`, in a .conll the last;
    # for question-answering with the answers, `answers`; for multiple-choice the place from 0 or the name
    label_column: str = "label"
    choice_columns: list[str] = field(default_factory=list)  # multiple-choice: one with a list, or one for each choice
    # question-answering: true: a context may hold no answer, as in SQuAD 2; false: a question without one is refused
    unanswerable: bool = False
    # predict no answer if the score of [CLS] exceeds the best span's by more than this; as null_score_diff_threshold
    null_threshold: float = 0.0
    max_answer_tokens: int = knob(30, low=1)  # longest answer
    overlap_tokens: int = 128  # overlap of two windows of a long context, as transformers' doc_stride
    id_column: str | None = None  # column with the id of a text in predictions.jsonl; None: its line number
    label_separator: str = ","  # multi-label: between the classes of a text, if they are not a list
    # classes in the order of the logits; a whole number in the data may mean the class of that index; []: as in `train`
    labels: list[str] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)  # []: the usual one; see docs/finetuning.md
    # metric, or `loss`, on the first of `validation` that chooses the epoch: the best metric, or the lowest loss; None:
    # the last epoch
    best: str | None = None
    lr: float = rate_knob(5e-5)  # peak
    # share by which weights shrink in each step at the peak, independent of the learning rate: decoupled decay of
    # Composer
    weight_decay: float = knob(1e-5, low=0, below=1, why=_SHRINKS)
    epochs: float = knob(3.0, above=0)
    steps: int | None = knob(None, above=0)  # approximate number of updates, overrides epochs
    large: LargeConfig = field(default_factory=LargeConfig)
    # freezes the encoder and trains a linear head on its hidden states: a baseline, and a measure of the encoder
    freeze: bool = False
    frozen: FrozenConfig = field(default_factory=FrozenConfig)
    lora: AdapterConfig | None = None  # train low-rank adapters, such as lora: {rank: 8}
    batch_texts: int = knob(64, above=0)  # approximate; a batch is whole rows of packed texts
    # longer texts are truncated, special tokens included
    max_tokens: int = knob(256, low=8, why="for text between the special tokens")
    # clips the gradient to this norm, as transformers' Trainer does; None: no clipping
    max_grad_norm: float | None = knob(1.0, above=0, why="or null, which does not clip")
    # share of the training in which the learning rate rises; then it falls linearly to 0
    warmup: float = knob(0.06, low=0, below=1)
    pooling: Literal["cls", "mean"] | None = None  # None: mean for ModernBERT and frozen encoders, cls for others

    @property
    def measured(self) -> list[str]:
        return self.metrics or [KINDS[self.kind].metrics[0]]

    @property
    def spans(self) -> bool:
        """True if tags mark spans."""
        return any(name.startswith(SPANS) for name in self.measured)

    @property
    def word_column(self) -> str:
        """Column of the words in a table."""
        return "tokens" if self.text_columns == ["text"] else self.text_columns[0]

    @property
    def tag_column(self) -> str:
        """Column of the tags in a table."""
        return "tags" if self.label_column == "label" else self.label_column


TASK_KEYS = tuple(each.name for each in fields(TaskConfig))


def common_problems(task: TaskConfig) -> Iterator[str]:
    """Yield mistakes in keys that all kinds share, found without files; see also `Kind.problems`."""
    yield from bound_mistakes(task)
    yield from split_name_problems(task.validation)
    for name in task.predict:
        if name in task.validation or not _plain(name):
            yield f"predict.{name}: the name is used in predictions. Use letters, digits, '_' and '-', each name once."
    if task.best is not None and task.best not in ("loss", *task.measured):
        choices = ", ".join(("loss", *task.measured))
        yield f"best={task.best}: is not measured. Choose from {choices}, or add it to metrics."
    for kind, row in KINDS.items():
        for key in row.keys if kind != task.kind else ():
            if getattr(task, key) != getattr(TaskConfig(kind=task.kind, train=task.train), key):
                yield f"{key}={getattr(task, key)}: only for kind={kind}. Remove it."
    if task.freeze and task.lora is not None:
        yield "freeze=true with lora: a frozen encoder learns nothing. Remove one of them."
    if task.label_column in task.text_columns:
        yield f"label_column={task.label_column} is also one of text_columns: the text would contain the label."
    if len({*task.labels}) < len(task.labels):
        yield f"labels={task.labels}: a name is listed twice. Remove one."
    if len(task.labels) == 1:
        yield f"labels={task.labels}: one class is not enough. Remove the key or add classes."
    for name in task.metrics:
        if name not in KINDS[task.kind].metrics:
            yield f"metrics: {name} is not one of kind={task.kind}. Choose from {', '.join(KINDS[task.kind].metrics)}."


def split_name_problems(validation: Mapping[str, str]) -> Iterator[str]:
    """Yield mistakes in the names of validation splits."""
    if not validation:
        yield "validation: empty, and at least one split is needed. Name it: validation: {dev: FILE}."
    for name in validation:
        if not _plain(name):
            yield (
                f"validation.{name}: the name is used in metrics. Use letters, digits, '_' and '-', and neither train "
                "nor heldout."
            )


def _plain(name: str) -> bool:
    return is_plain_name(name) and name not in ("heldout", "train")
