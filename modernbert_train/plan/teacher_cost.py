"""The cost of a teacher: FLOPs and memory of its forward pass, from its configuration alone."""

from __future__ import annotations

import math
from typing import cast

from modernbert_train.config.schema import DistillConfig, MaskedLmConfig, ModelConfig, ObjectiveConfig
from modernbert_train.plan.census import census
from modernbert_train.plan.flops import Spans, flops_per_token
from modernbert_train.plan.parameters import count_parameters


def teacher_of(objective: ObjectiveConfig) -> ModelConfig | None:
    """Return the teacher's architecture; None without one, or if it is not here or is a file of Composer."""
    from modernbert_train.weights.names import architecture_of

    return None if objective.named_teacher is None else architecture_of(objective.named_teacher)


def teacher_flops(objective: ObjectiveConfig, spans: Spans | None, uses: dict[str, float]) -> float:
    """Return the FLOPs of its forward pass for a token; 0 without a teacher.

    Args:
        objective: the run's objective.
        spans: keys that a token sees in the teacher's layers; None without a teacher.
        uses: for each head of the objective, see `flops_per_token`.
    """
    model = teacher_of(objective)
    if model is None or spans is None:
        return 0.0
    return flops_per_token(census(model), spans, {"tokens": uses.get("kl", 0.0)}).forward


def teacher_bytes(
    objective: ObjectiveConfig, *, bf16: bool, tokens: int, chunk: int, compiled: bool = False, shards: int = 1
) -> int:
    """Return the bytes of a teacher on every GPU.

    Unsharded: its weights, with layers and heads in the precision of products, and a copy of the table for predictions.
    Sharded: a share of these, the copy of the table, and gathered the parameters outside the layers and two layers.
    Then three hidden states in fp32 and the peak of a layer: either queries, keys and values with four fp32 copies of q
    and k for the rotation, or the feed-forward output, activated and multiplied; compiled layers take a part of that,
    which is an estimate. The divergence adds five numbers for each of a chunk's logits in fp32.

    Args:
        objective: the run's objective.
        bf16: True if the run uses it.
        tokens: tokens of a microbatch.
        chunk: positions whose logits exist at a time.
        compiled: True if layers are compiled.
        shards: ranks that share the weights.
    """
    model = teacher_of(objective)
    if model is None:
        return 0
    objective = cast(DistillConfig, objective)  # the only objective with a teacher
    precise = {"auto": not bf16, "fp32": True, "bf16": False}[objective.teacher_precision]
    c, counted = (4 if precise else 2), count_parameters(model, MaskedLmConfig(), shards=shards)
    weights = -(-(4 * (counted.total - counted.hidden) + c * counted.hidden) // shards)
    weights += c * counted.embedding if objective.kl_weight and (shards > 1 or not precise) else 0
    gathered = 4 * counted.root + 2 * c * counted.layer if shards > 1 and tokens else 0
    width, hidden = model.attention_width, model.intermediate_size
    layer = c * max(6 * width, 3 * hidden) if compiled else max(44 * width, 4 * c * hidden)
    states = tokens * (12 * model.hidden_size + layer)
    divergence = 20 * math.ceil(chunk / 2) * model.vocab_size if objective.kl_weight else 0
    return weights + max(gathered + states, divergence)
