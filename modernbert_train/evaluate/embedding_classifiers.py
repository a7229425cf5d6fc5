"""Classifiers on embeddings. They run in fp64 on the CPU and start from zero, so figures are reproducible.

Targets are a 1 for the class of a text, or a 0 or 1 for each class, or a score; outputs are logits, or a score.

Shape legend: L training texts, N texts to predict, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from modernbert_train.evaluate.finetune.kinds import Link

_ITERATIONS = 200
_BLOCK = 1024  # texts compared with all others at a time
_BETWEEN = {"softmax": 0.0, "sigmoid": 0.5, "identity": 0.0}  # share of 1s above which a class is predicted

Classify = Callable[[Tensor, Tensor, Tensor, Link], Tensor]


def linear(learned_LD: Tensor, targets_LC: Tensor, texts_ND: Tensor, link: Link) -> Tensor:
    """Fit logistic or ridge regression to standardised embeddings, with scikit-learn's default penalty, and predict.

    Args:
        learned_LD, targets_LC: training embeddings and their targets.
        texts_ND: embeddings to predict for.
        link: meaning of the outputs, see `Kind`; identity is ridge regression, in closed form.

    Returns:
        outputs_NC.
    """
    mean_D, deviation_D = learned_LD.mean(dim=0), learned_LD.std(dim=0, correction=0)
    varies_D = deviation_D > 1e-9 * mean_D.abs()  # above the rounding error of a mean
    deviation_D = torch.where(varies_D, deviation_D, 1.0)
    input_LD = (learned_LD - mean_D) / deviation_D
    weight_CD = torch.zeros(targets_LC.shape[1], input_LD.shape[1], dtype=input_LD.dtype, requires_grad=True)
    bias_C = torch.zeros(len(weight_CD), dtype=input_LD.dtype, requires_grad=True)
    if link == "identity":
        bias_C, width = targets_LC.mean(dim=0), input_LD.shape[1]
        penalised_DD = input_LD.T @ input_LD + torch.eye(width, dtype=input_LD.dtype)
        weight_CD = torch.linalg.solve(penalised_DD, input_LD.T @ (targets_LC - bias_C)).T
    else:
        optimizer = torch.optim.LBFGS([weight_CD, bias_C], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            outputs_LC = input_LD @ weight_CD.T + bias_C
            if link == "softmax":
                fit = F.cross_entropy(outputs_LC, targets_LC.argmax(dim=1))
            else:  # one regression for each class
                fit = F.binary_cross_entropy_with_logits(outputs_LC, targets_LC, reduction="sum") / len(input_LD)
            objective = fit + weight_CD.square().sum() / (2 * len(input_LD))
            objective.backward()
            return objective

        optimizer.step(loss)
    with torch.no_grad():
        return ((texts_ND - mean_D) / deviation_D) @ weight_CD.T + bias_C


def nearest(learned_LD: Tensor, targets_LC: Tensor, texts_ND: Tensor, link: Link) -> Tensor:
    """Predict the label of the nearest text by cosine, the first of ties. Arguments as `linear`."""
    learned_DL = F.normalize(learned_LD, dim=1).T
    nearest_of = [(F.normalize(part, dim=1) @ learned_DL).argmax(dim=1) for part in texts_ND.split(_BLOCK)]
    return targets_LC[torch.cat(nearest_of)] - _BETWEEN[link]


def majority(learned_LD: Tensor, targets_LC: Tensor, texts_ND: Tensor, link: Link) -> Tensor:
    """Always predict the most frequent class, the first of ties. Arguments as `linear`."""
    return (targets_LC.mean(dim=0) - _BETWEEN[link]).expand(len(texts_ND), -1)


CLASSIFIERS: dict[str, Classify] = {"linear": linear, "nearest": nearest}
