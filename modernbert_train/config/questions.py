"""Objectives for questions: the span of an answer in a text, or one of several choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modernbert_train.config.classify import LabelledConfig
from modernbert_train.config.knob import knob


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(LabelledConfig):
    """The first and the last token of the answer to a question, in a window of its context.

    In a window without the answer both are [CLS]. Documents are pairs, the question first.
    """

    name: str = "answer"
    labels: tuple[str, ...] = ("start", "end")
    segments: int = knob(1, low=1, high=2)  # 2: the context has token type 1
    unanswerable: bool = False  # true: a context may hold no answer, as in SQuAD 2; else a span is always predicted
    # predict no answer if the score of [CLS] exceeds the best span's by more than this; transformers'
    # null_score_diff_threshold
    null_threshold: float = 0.0
    max_answer_tokens: int = knob(30, above=0)  # longest answer
    task_kind = "question-answering"

    title = "answering questions by spans", None

    heads = ("answer",)

    label_unit = "tokens"


@dataclass(frozen=True, kw_only=True)
class ChooseConfig(LabelledConfig):
    """One of several choices: a score of each, and cross-entropy over the choices of a question.

    A document holds all choices of a question, each as one sequence. `labels` are their names by place, as many as the
    longest list of choices.
    """

    name: str = "choose"
    pooling: Literal["cls", "mean"] = "mean"  # see `ClassifyConfig`
    segments: int = knob(1, low=1, high=2)  # 2: the text after the first [SEP] of a choice has token type 1
    task_kind = "multiple-choice"
    num_logits = 1
    pools = True

    title = "multiple choice", None

    heads = ("choice",)

    def has_shorter_sequences(self, max_tokens: int) -> bool:
        """See `ObjectiveConfig`: each choice has its own positions."""
        return True

    @property
    def label_scheme(self) -> tuple[str, ...]:
        return (self.task_kind,)  # the score of a choice does not depend on their number

    @property
    def prediction_width(self) -> int:
        return len(self.labels)

    def uses_of_heads(self, sequence_tokens: float) -> dict[str, float]:
        """See `ObjectiveConfig`: for each choice; a document has at least two."""
        return {"choice": max(2, len(self.labels)) / sequence_tokens}
