"""The first of two passes, for an objective that compares texts across all microbatches and ranks.

Compute every vector without a graph, then the loss of the global batch and its gradient by each vector. With that
gradient as a target, each microbatch is trained like any other (GradCache, arXiv 2101.06983), however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from modernbert_train.batch import Batch, Sums
from modernbert_train.config.schema import ContrastiveConfig, ObjectiveConfig
from modernbert_train.distributed.group import rows_of_all, sum_over_ranks
from modernbert_train.errors import DataError
from modernbert_train.models.contrastive import FLOPS, GRADIENT, LOSS, SCALE_GRADIENT, Texts, compare, flops_of, rows_of


def first_pass(
    forward: Callable[[int, Batch], Sums],
    microbatches: Sequence[Batch],
    objective: ObjectiveConfig,
    device: torch.device,
) -> list[Mapping[str, Tensor]]:
    """Compute the extra targets of a rank's microbatches.

    Args:
        forward: returns the vectors of the microbatch with this index, with its dropout.
        microbatches: this rank's microbatches, on the host.
        objective: the objective in the current phase.
        device: this rank's device.

    Raises:
        DataError: the global batch has only one pair, so there are no negatives.
    """
    settings = cast(ContrastiveConfig, objective)
    texts = [Texts.of(each, settings) for each in microbatches]
    rows = [rows_of(each, settings).to(device) for each in microbatches]
    vectors, sizes = [], []
    with torch.no_grad():
        for number, each in enumerate(microbatches):
            encoded = forward(number, each.to(device, non_blocking=True))
            assert encoded.vectors is not None
            vectors.append(encoded.vectors.index_select(0, rows[number]))
            sizes.append(len(encoded.vectors))
    all_VW, texts_of_all, own = rows_of_all(torch.cat(vectors), Texts.joined(texts))
    everyone = Texts.joined(texts_of_all)
    if len(everyone) < 3:
        raise DataError(
            f"the global batch has {everyone.num_queries} pair, and a positive needs other texts as negatives. Raise "
            "batch_rows or row_tokens of the phase."
        )
    compared = compare(all_VW, everyone, own, settings, backward=True, scale=encoded.scale)
    assert compared.gradient_VW is not None and compared.scale_gradient_Q is not None
    sum_over_ranks(compared.gradient_VW)
    gradients = compared.gradient_VW[own].split([len(each) for each in rows])
    queries = [each.num_queries for each in texts]
    losses, of_scale = compared.losses_Q.split(queries), compared.scale_gradient_Q.split(queries)
    flops = {FLOPS: flops_of(all_VW, everyone, settings)} if settings.is_sparse else {}
    targets: list[Mapping[str, Tensor]] = []
    for size, positions, gradient, loss, by_scale in zip(sizes, rows, gradients, losses, of_scale, strict=True):
        padded = gradient.new_zeros(size, gradient.shape[1])
        padded[positions] = gradient
        targets.append({GRADIENT: padded, LOSS: loss.sum(), SCALE_GRADIENT: by_scale.sum(), **flops})
    return targets
