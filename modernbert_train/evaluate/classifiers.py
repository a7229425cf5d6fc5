"""Classifiers of embeddings. They run in fp64 on the CPU and start from zero, so figures are reproducible.

Shape legend: L training texts, N texts to predict, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_ITERATIONS = 200
_BLOCK = 1024  # texts compared with all others at a time

Classify = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def linear(learned_LD: Tensor, labels_L: Tensor, num_classes: int, told_ND: Tensor) -> Tensor:
    """Fit logistic regression to standardised embeddings, with scikit-learn's default penalty (C = 1), and predict.

    Args:
        learned_LD, labels_L: training embeddings and their classes.
        num_classes: C.
        told_ND: embeddings to predict classes for.

    Returns:
        The predicted class of each text: int64, N.
    """
    mean_D, deviation_D = learned_LD.mean(dim=0), learned_LD.std(dim=0, correction=0)
    varies_D = deviation_D > 1e-9 * mean_D.abs()  # more than a mean is rounded by
    deviation_D = torch.where(varies_D, deviation_D, 1.0)
    input_LD = (learned_LD - mean_D) / deviation_D
    weight_CD = torch.zeros(num_classes, input_LD.shape[1], dtype=input_LD.dtype, requires_grad=True)
    bias_C = torch.zeros(num_classes, dtype=input_LD.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_CD, bias_C], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        fit = F.cross_entropy(input_LD @ weight_CD.T + bias_C, labels_L)
        found = fit + weight_CD.square().sum() / (2 * len(input_LD))
        found.backward()
        return found

    optimizer.step(loss)
    with torch.no_grad():
        return (((told_ND - mean_D) / deviation_D) @ weight_CD.T + bias_C).argmax(dim=1)


def nearest(learned_LD: Tensor, labels_L: Tensor, num_classes: int, told_ND: Tensor) -> Tensor:
    """Predict the class of the nearest text by cosine, the first of ties. Arguments as `linear`."""
    learned_DL = F.normalize(learned_LD, dim=1).T
    found = [(F.normalize(part, dim=1) @ learned_DL).argmax(dim=1) for part in told_ND.split(_BLOCK)]
    return labels_L[torch.cat(found)]


def majority(learned_LD: Tensor, labels_L: Tensor, num_classes: int, told_ND: Tensor) -> Tensor:
    """Predict always the most frequent class, the first of ties. Arguments as `linear`."""
    return torch.bincount(labels_L, minlength=num_classes).argmax().expand(len(told_ND))


CLASSIFIERS: dict[str, Classify] = {"linear": linear, "nearest": nearest}
