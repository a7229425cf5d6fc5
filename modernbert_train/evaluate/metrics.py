"""Metrics of classes, scores and spans. Counting and correlations are torchmetrics'; spans are read here.

Shape legend: N texts, L logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from modernbert_train import import_stubs
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.evals import BASELINE

import_stubs.install()

from torchmetrics.functional import classification, regression  # noqa: E402

Tags = Sequence[str]
Metric = Callable[[Tensor, Tensor], Any]  # of predictions and labels


def accuracy(predicted_N: Tensor, labels_N: Tensor) -> float:
    """Return the share of texts whose class was predicted."""
    return float((predicted_N == labels_N).double().mean())


def f1(predicted_N: Tensor, labels_N: Tensor) -> float:
    """Return the F1 of the second of two classes, as in GLUE."""
    return float(classification.binary_f1_score((predicted_N == 1).long(), (labels_N == 1).long()))


def macro_f1(predicted_N: Tensor, labels_N: Tensor) -> float:
    """Return the mean of the classes' F1, without classes absent from both labels and predictions."""
    return float(
        classification.multiclass_f1_score(predicted_N, labels_N, _classes(predicted_N, labels_N), average="macro")
    )


def relation_f1(predicted_N: Tensor, labels_N: Tensor) -> float:
    """Return F1 over the texts of all classes but the first, which means no relation; 0 without any."""
    right = int(((predicted_N == labels_N) & (labels_N > 0)).sum())
    return 2 * right / max(1, int((predicted_N > 0).sum() + (labels_N > 0).sum()))


def matthews(predicted_N: Tensor, labels_N: Tensor) -> float:
    """Matthews' correlation; 0 if all labels or all predictions are one class, as scikit-learn has it."""
    if min(len(each.unique()) for each in (predicted_N, labels_N)) < 2:
        return 0.0
    return float(classification.multiclass_matthews_corrcoef(predicted_N, labels_N, _classes(predicted_N, labels_N)))


def pearson(predicted_N: Tensor, scores_N: Tensor) -> float:
    """Pearson's correlation; NaN if all scores are equal."""
    return _correlation(regression.pearson_corrcoef, predicted_N, scores_N)


def spearman(predicted_N: Tensor, scores_N: Tensor) -> float:
    """Spearman's correlation of ranks, where ties share a rank; NaN if all scores are equal."""
    return _correlation(regression.spearman_corrcoef, predicted_N, scores_N)


def exact(predicted_NL: Tensor, labels_NL: Tensor) -> float:
    """Return the share of texts with exactly the right classes predicted."""
    return float((predicted_NL == labels_NL).all(dim=1).double().mean())


def micro_f1_of_many(predicted_NL: Tensor, labels_NL: Tensor) -> float:
    """Return the F1 over all classes of all texts together."""
    return _f1_of_many(predicted_NL, labels_NL, "micro")


def macro_f1_of_many(predicted_NL: Tensor, labels_NL: Tensor) -> float:
    """Return the mean of the classes' F1."""
    return _f1_of_many(predicted_NL, labels_NL, "macro")


def _f1_of_many(predicted_NL: Tensor, labels_NL: Tensor, average: Literal["micro", "macro"]) -> float:
    if labels_NL.shape[1] == 1:  # which torchmetrics refuses
        return float(classification.binary_f1_score(predicted_NL[:, 0], labels_NL[:, 0]))
    return float(classification.multilabel_f1_score(predicted_NL, labels_NL, labels_NL.shape[1], average=average))


def _correlation(measure: Metric, predicted_N: Tensor, scores_N: Tensor) -> float:
    varies = all(bool(each_N.min() < each_N.max()) for each_N in (predicted_N, scores_N))
    return float(measure(predicted_N.double(), scores_N.double())) if varies else float("nan")


def _classes(predicted_N: Tensor, labels_N: Tensor) -> int:
    return max(2, int(torch.maximum(predicted_N.max(), labels_N.max())) + 1)


OF_CLASSES: Mapping[str, Metric] = {
    "accuracy": accuracy, "f1": f1, "macro_f1": macro_f1, "relation_f1": relation_f1, "matthews": matthews,
}  # fmt: skip
OF_SEVERAL: Mapping[str, Metric] = {"accuracy": exact, "micro_f1": micro_f1_of_many, "macro_f1": macro_f1_of_many}
OF_SCORES: Mapping[str, Metric] = {"pearson": pearson, "spearman": spearman}


def class_figures(logits_NL: Tensor, labels: NDArray[Any], metrics: Sequence[str]) -> dict[str, float]:
    """Return loss and metrics of single-label classes, with the accuracy of always predicting the most frequent.

    Args:
        logits_NL: of each text or word.
        labels: numbers of their classes, N; classes from L on lack logits, and the loss leaves them out.
        metrics: names of `OF_CLASSES`.
    """
    predicted_N, labels_N = logits_NL.argmax(dim=1), torch.from_numpy(labels).long()
    known_N = labels_N < logits_NL.shape[1]
    loss = float(F.cross_entropy(logits_NL[known_N].double(), labels_N[known_N]))
    figures = {name: OF_CLASSES[name](predicted_N, labels_N) for name in metrics}
    if "accuracy" in figures:
        figures[f"{BASELINE}accuracy"] = float(torch.bincount(labels_N).max()) / len(labels_N)
    return {"loss": loss, **finite(logits_NL, figures)}


def several_figures(logits_NL: Tensor, labels: NDArray[Any], metrics: Sequence[str]) -> dict[str, float]:
    """Return loss and metrics of multi-label classes.

    Args:
        logits_NL: of each text.
        labels: 0 or 1 for each class, N x L or more; classes from L on lack logits, are never predicted, and the loss
            leaves them out.
        metrics: names of `OF_SEVERAL`.
    """
    num_classes, labels_NL = logits_NL.shape[1], torch.from_numpy(labels).long()
    predicted_NL = F.pad((logits_NL > 0).long(), (0, labels_NL.shape[1] - num_classes))
    loss = float(F.binary_cross_entropy_with_logits(logits_NL.double(), labels_NL[:, :num_classes].double()))
    return {"loss": loss, **finite(logits_NL, {name: OF_SEVERAL[name](predicted_NL, labels_NL) for name in metrics})}


def score_figures(logits_N1: Tensor, scores: NDArray[Any], metrics: Sequence[str]) -> dict[str, float]:
    """Return the mean squared error and metrics of scores.

    Args:
        logits_N1: of each text.
        scores: the right ones, N.
        metrics: names of `OF_SCORES`.
    """
    predicted_N, scores_N = logits_N1.squeeze(1), torch.from_numpy(scores)
    loss = float((predicted_N.double() - scores_N.double()).square().mean())
    return {"loss": loss, **finite(logits_N1, {name: OF_SCORES[name](predicted_N, scores_N) for name in metrics})}


def span_loss(logits_T2: Tensor, spans: Sequence[NDArray[Any]], sizes: Sequence[int]) -> float:
    """Return the cross-entropy of both ends of a span, averaged over windows with a known span.

    Args:
        logits_T2: of each token of each window.
        spans: first and last token of each window's span, 1 x 2.
        sizes: tokens of each window.
    """
    losses = [
        float(F.cross_entropy(logits_N2.T, torch.from_numpy(span[0].astype(np.int64))))
        for logits_N2, span in zip(logits_T2.double().split(list(sizes)), spans, strict=True)
        if span[0, 0] != IGNORED_LABEL
    ]
    return sum(losses) / len(losses) if losses else float("nan")


def finite(logits: Tensor, figures: dict[str, float]) -> dict[str, float]:
    """Return the figures, all NaN if any logit is not finite."""
    return figures if bool(logits.isfinite().all()) else dict.fromkeys(figures, float("nan"))


@dataclass(frozen=True)
class Span:
    """Words from `first` up to `end` that are one entity."""

    kind: str
    first: int
    end: int


def spans(tags: Tags) -> list[Span]:
    """Return the entities of a text, as CoNLL's evaluation reads tags: both IOB schemes, and IOBES.

    B and S begin one, and so does I or E that continues none of its type; E and S end one.
    """
    entities, first, open_kind = [], 0, ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if open_kind and (prefix in "BSO" or kind != open_kind):
            entities.append(Span(open_kind, first, index))
            open_kind = ""
        if prefix != "O" and not open_kind:
            first, open_kind = index, kind
        if open_kind and prefix in "ES":
            entities.append(Span(open_kind, first, index + 1))
            open_kind = ""
    return entities


def entity_figures(predicted: Sequence[Tags], labels: Sequence[Tags]) -> dict[str, float]:
    """Return precision, recall and F1 of exact spans with their types, over all texts; 0 without any."""
    pairs = [({*spans(mine)}, {*spans(theirs)}) for mine, theirs in zip(predicted, labels, strict=True)]
    right = sum(len(mine & theirs) for mine, theirs in pairs)
    precision = right / max(1, sum(len(mine) for mine, _ in pairs))
    recall = right / max(1, sum(len(theirs) for _, theirs in pairs))
    both = precision + recall
    return {
        "entity_f1": 2 * precision * recall / both if both else 0.0,
        "entity_precision": precision,
        "entity_recall": recall,
    }
