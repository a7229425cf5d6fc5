"""Kinds of labelled tasks, by the name in a task's YAML, `kind`.

A new kind is a file in evaluate/finetune/ and a row here. The row holds the facts for checking a configuration; the
class that it names is imported by the first task of that kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class KindRow(NamedTuple):
    """Facts of one kind of task.

    Attributes:
        code: module in evaluate/finetune/ and class, see `evaluate.finetune.kinds.Kind`.
        metrics: the available ones; the first is the default.
        keys: keys of a task that only this kind has.
        probed: metrics of a probe; empty if a text has more than one embedding or label, so a probe cannot learn it.
        learned_as: another kind with the same objective, from which a run cannot tell this one; None: its own.
    """

    code: str
    metrics: tuple[str, ...]
    keys: tuple[str, ...] = ()
    probed: tuple[str, ...] = ()
    learned_as: str | None = None


SPANS = "entity_"  # prefix of metrics of spans: tags are O, B-x, I-x, E-x, S-x
KINDS: dict[str, KindRow] = {
    "single-label": KindRow(
        "classes:OneClass",
        ("accuracy", "f1", "macro_f1", "matthews"),
        probed=("accuracy", "macro_f1"),
    ),
    "multi-label": KindRow(
        "classes:SeveralClasses", ("micro_f1", "macro_f1", "accuracy"), probed=("micro_f1", "macro_f1")
    ),
    "regression": KindRow("classes:Score", ("pearson", "spearman"), probed=("pearson", "spearman")),
    "question-answering": KindRow(
        "answers:Answers",
        ("f1", "exact", "has_answer_f1", "has_answer_exact", "no_answer_exact"),
        ("unanswerable", "null_threshold", "max_answer_tokens", "overlap_tokens"),
    ),
    "multiple-choice": KindRow("choices:Choices", ("accuracy",), ("choice_columns",)),
    "tokens": KindRow("words:Words", ("entity_f1", "entity_precision", "entity_recall", "accuracy", "macro_f1")),
    "relation": KindRow("relation:Relation", ("relation_f1", "macro_f1", "accuracy"), learned_as="single-label"),
}


def metrics_of_objective(kind: str) -> list[str]:
    """Return the metrics of all kinds that are learned as this one."""
    rows = (row for name, row in KINDS.items() if kind in (name, row.learned_as))
    return list(dict.fromkeys(metric for row in rows for metric in row.metrics))


if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]  # the loader refuses other names, and the page of keys lists these
