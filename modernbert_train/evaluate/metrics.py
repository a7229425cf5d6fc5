"""Metrics of classes, scores and spans. Counting and correlations are torchmetrics'; spans are read here.

Shape legend: N texts, L logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modernbert_train import import_stubs
from modernbert_train.config.evals import METRICS_OF

import_stubs.install()

from torchmetrics.functional import classification, regression  # noqa: E402

Tags = Sequence[str]


def accuracy(told_N: Tensor, labels_N: Tensor) -> float:
    """Share of texts whose class was told."""
    return float((told_N == labels_N).double().mean())


def f1(told_N: Tensor, labels_N: Tensor) -> float:
    """Of the second of two classes, as GLUE's."""
    return float(classification.binary_f1_score((told_N == 1).long(), (labels_N == 1).long()))


def macro_f1(told_N: Tensor, labels_N: Tensor) -> float:
    """Mean of the classes' F1, those left out that no text has nor was told to have."""
    return float(classification.multiclass_f1_score(told_N, labels_N, _classes(told_N, labels_N), average="macro"))


def matthews(told_N: Tensor, labels_N: Tensor) -> float:
    """Matthews' correlation; 0 where all texts have, or are told, one class, as scikit-learn has it."""
    if min(len(each.unique()) for each in (told_N, labels_N)) < 2:
        return 0.0
    return float(classification.multiclass_matthews_corrcoef(told_N, labels_N, _classes(told_N, labels_N)))


def pearson(told_N: Tensor, scores_N: Tensor) -> float:
    """Pearson's correlation; NaN where all scores are one."""
    return float(regression.pearson_corrcoef(told_N.double(), scores_N.double()))


def spearman(told_N: Tensor, scores_N: Tensor) -> float:
    """Spearman's correlation of ranks, equal ones sharing theirs; NaN where all scores are one."""
    found = regression.spearman_corrcoef(told_N.double(), scores_N.double())
    varies = bool(told_N.min() < told_N.max()) and bool(scores_N.min() < scores_N.max())
    return float(found) if varies else float("nan")


def exact(told_NL: Tensor, labels_NL: Tensor) -> float:
    """Share of texts all of whose classes were told, and no others."""
    return float((told_NL == labels_NL).all(dim=1).double().mean())


def micro_f1_of_many(told_NL: Tensor, labels_NL: Tensor) -> float:
    """F1 of all classes of all texts together."""
    return float(classification.multilabel_f1_score(told_NL, labels_NL, labels_NL.shape[1], average="micro"))


def macro_f1_of_many(told_NL: Tensor, labels_NL: Tensor) -> float:
    """Mean of the classes' F1."""
    return float(classification.multilabel_f1_score(told_NL, labels_NL, labels_NL.shape[1], average="macro"))


def _classes(told_N: Tensor, labels_N: Tensor) -> int:
    return max(2, int(torch.maximum(told_N.max(), labels_N.max())) + 1)


# kind of task -> its metrics by name, of what was told and what is so
METRICS: Mapping[str, Mapping[str, Callable[[Tensor, Tensor], float]]] = {
    "single-label": {"accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "matthews": matthews},
    "multi-label": {"accuracy": exact, "micro_f1": micro_f1_of_many, "macro_f1": macro_f1_of_many},
    "regression": {"pearson": pearson, "spearman": spearman},
    "multiple-choice": {"accuracy": accuracy},
}
assert all({*METRICS_OF[kind]} == {*each} for kind, each in METRICS.items())


@dataclass(frozen=True)
class Span:
    """Words from `first` up to `end` that are one entity."""

    kind: str
    first: int
    end: int


def spans(tags: Tags) -> list[Span]:
    """Entities of a text, as CoNLL's evaluation reads tags: IOB of both kinds, and IOBES.

    B and S begin one, and so does I or E that goes on with none of its type; E and S end one.
    """
    found, first, open_kind = [], 0, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if open_kind and (prefix in "BSO" or kind != open_kind):
            found.append(Span(open_kind, first, place))
            open_kind = ""
        if prefix != "O" and not open_kind:
            first, open_kind = place, kind
        if open_kind and prefix in "ES":
            found.append(Span(open_kind, first, place + 1))
            open_kind = ""
    return found


def entity_figures(told: Sequence[Tags], labels: Sequence[Tags]) -> dict[str, float]:
    """Precision, recall and F1 of exact spans with their types, over all texts; 0 where there is none."""
    pairs = [({*spans(mine)}, {*spans(theirs)}) for mine, theirs in zip(told, labels, strict=True)]
    right = sum(len(mine & theirs) for mine, theirs in pairs)
    precision = right / max(1, sum(len(mine) for mine, _ in pairs))
    recall = right / max(1, sum(len(theirs) for _, theirs in pairs))
    both = precision + recall
    return {
        "entity_f1": 2 * precision * recall / both if both else 0.0,
        "entity_precision": precision,
        "entity_recall": recall,
    }
