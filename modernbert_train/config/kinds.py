"""Kinds of labelled tasks, by the name that a task gives: `kind` of a task's YAML.

A new kind is a file in evaluate/finetune/ and a row here. The row holds the facts that a configuration is checked with;
the class that it names is imported by the first task of that kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class KindRow(NamedTuple):
    """Facts of one kind of task.

    Attributes:
        code: module in evaluate/finetune/ and class, see `evaluate.finetune.kinds.Kind`.
        metrics: those that can be measured; the first is the default.
        keys: keys of a task that are of this kind alone.
    """

    code: str
    metrics: tuple[str, ...]
    keys: tuple[str, ...] = ()


SPANS = "entity_"  # begins the name of a metric of spans: tags are O, B-x, I-x, E-x, S-x
KINDS: dict[str, KindRow] = {
    "single-label": KindRow("classes:OneClass", ("accuracy", "f1", "macro_f1", "relation_f1", "matthews")),
    "multi-label": KindRow("classes:SeveralClasses", ("micro_f1", "macro_f1", "accuracy")),
    "regression": KindRow("classes:Score", ("pearson", "spearman")),
    "question-answering": KindRow(
        "answers:Answers",
        ("f1", "exact", "has_answer_f1", "has_answer_exact", "no_answer_exact"),
        ("unanswerable", "null_threshold", "max_answer_tokens", "overlap_tokens"),
    ),
    "multiple-choice": KindRow("choices:Choices", ("accuracy",), ("choice_columns",)),
    "tokens": KindRow("words:Words", ("entity_f1", "entity_precision", "entity_recall", "accuracy", "macro_f1")),
    "relation": KindRow("relation:Relation", ("relation_f1", "macro_f1", "accuracy")),
}

if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]  # the loader refuses other names, and the page of keys lists these
