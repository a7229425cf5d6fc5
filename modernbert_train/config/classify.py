"""Objectives for labelled texts: a class, several classes or a score for a text, or a class for each of its words.

`labels` lists the names in the order of the logits, so a checkpoint can be exported without the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from modernbert_train.config.knob import knob
from modernbert_train.config.model import ModelConfig
from modernbert_train.config.objective import ObjectiveConfig

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # suffixes of an adapter's matrices, as in peft


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, with the keys of peft's LoraConfig; see models/lora.py."""

    rank: int = knob(8, low=1, high=1024)
    alpha: float | None = knob(None, above=0)  # the product is scaled by alpha / rank; None: twice the rank
    dropout: float = knob(0.0, low=0, below=1)  # of an adapter's input, in training only
    targets: tuple[str, ...] = ()  # last parts of linear layers' names, such as Wqkv; (): all of the layers

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))  # YAML gives a list, which cannot be hashed

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


@dataclass(frozen=True, kw_only=True)
class LabelledConfig(ObjectiveConfig):
    """Keys of all labelled objectives. Documents are stored with labels, as `finetune` writes them."""

    labels: tuple[str, ...] = ()  # names of the classes, in the order of the logits
    dropout: float = knob(0.0, low=0, below=1)  # before the last matrix, in training only
    # freezes the encoder, without dropout; only one matrix on its hidden states is trained
    freeze: bool = False
    # low-rank adapters, trained instead of the encoder's weights; the head is trained in full
    lora: LoraConfig | None = None
    # longest text that the encoder was trained on, independent of the labelled texts: the limit of the exported model
    # and the next fine-tuning; None: the rows of the last phase
    max_tokens: int | None = knob(None, above=0, restart=True)
    predicted_share = 0.0  # no token is predicted

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))  # YAML gives a list, which cannot be hashed

    @property
    def num_logits(self) -> int:
        return len(self.labels)

    @property
    def prediction_width(self) -> int:
        """Width of the prediction for a text, or for each of its words."""
        return self.num_logits

    @property
    def task_kind(self) -> str:
        """See `TaskConfig.kind`."""
        raise NotImplementedError

    @property
    def label_scheme(self) -> tuple[str, ...]:
        return (self.task_kind, *self.labels)

    label_unit: ClassVar[Literal["texts", "words", "tokens"]] = "texts"
    """The unit of a label: each text, its labelled words, or each token of a document, special ones too."""

    pools: ClassVar[bool] = False
    """True if a logit is of a whole sequence."""

    @property
    def trains_encoder(self) -> bool:
        return not self.freeze

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: once per sequence, or for every token, an upper bound for words."""
        return {self.heads[0]: 1 / sequence_tokens if self.pools else 1.0}

    @property
    def min_labels(self) -> int:
        """Fewest classes."""
        return 2

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        here = f"objective.labels={list(self.labels)}"
        if len(self.labels) < self.min_labels:
            yield f"{here} with objective.name={self.name}: one class leaves nothing to distinguish. Name two."
        if len({*self.labels}) < len(self.labels):
            yield f"{here}: a name is listed twice. Remove one."
        if self.freeze and self.lora is not None:
            yield "objective.freeze=true with objective.lora: a frozen encoder learns nothing. Remove one of them."
        if self.segments > max(1, model.segments):
            yield f"objective.segments=2 with model.name={model.name}: it lacks a second token type. Set 1."


class TextLabels(NamedTuple):
    """A kind of text label; its loss is a row in models/classifier.py, its targets one in objectives/classify.py.

    Attributes:
        problem: transformers' problem_type.
        min_labels: fewest classes; 0: the label is a score, and no class has a name.
    """

    problem: str
    min_labels: int


TEXT_LABELS = {
    "single-label": TextLabels("single_label_classification", 2),
    "multi-label": TextLabels("multi_label_classification", 1),
    "regression": TextLabels("regression", 0),
}


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig(LabelledConfig):
    """A class, several classes or a score for each text or pair of texts."""

    name: str = "classify"
    # single-label: one class, cross-entropy; multi-label: any number of them, binary cross-entropy of each;
    # regression: a score, squared error
    kind: Literal["single-label", "multi-label", "regression"] = "single-label"
    # input of the head: the hidden state of [CLS], or the mean over the text, [CLS] and [SEP] included
    pooling: Literal["cls", "mean"] = "mean"
    segments: int = knob(1, low=1, high=2)  # 2: the second text of a pair has token type 1
    pools = True

    @property
    def title(self) -> tuple[str, str | None]:
        return "regression of scores" if self.is_score else "classification of texts", None

    @property
    def is_score(self) -> bool:
        """True for regression: a label is a number."""
        return self.min_labels == 0

    heads = ("class",)

    @property
    def task_kind(self) -> str:
        return self.kind

    @property
    def label_scheme(self) -> tuple[str, ...]:
        return (self.kind,) if self.is_score else super().label_scheme  # an export names the one score

    @property
    def num_logits(self) -> int:
        return 1 if self.is_score else len(self.labels)

    @property
    def min_labels(self) -> int:
        return TEXT_LABELS[self.kind].min_labels

    def mistakes(self, model: ModelConfig) -> Iterator[str]:
        """See `ObjectiveConfig`."""
        yield from super().mistakes(model)
        if self.is_score and self.labels:
            here = f"objective.labels={list(self.labels)} with objective.kind={self.kind}"
            yield f"{here}: a score has none. Remove them."


@dataclass(frozen=True, kw_only=True)
class TagConfig(LabelledConfig):
    """A class for each word, predicted at its first token."""

    name: str = "tag"
    task_kind = "tokens"

    title = "classification of words", None

    heads = ("tag",)

    label_unit = "words"
