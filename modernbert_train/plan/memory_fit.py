"""Fit a run into the memory of a GPU: find the largest microbatches, and refuse phases that are too large.

Neither data nor torch is needed, so a login node can refuse what no GPU of the kind could hold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from modernbert_train.config.auto import assigned, microbatch_key, with_settings
from modernbert_train.config.schema import (
    ContrastiveConfig,
    LabelledConfig,
    ModelConfig,
    ObjectiveConfig,
    PhaseConfig,
    RunConfig,
)
from modernbert_train.plan.gpus import HasMemory
from modernbert_train.plan.memory import (
    KEPT,
    TEXT_TOKENS,
    Memory,
    Strategy,
    adapters_bytes,
    compared_bytes,
    compared_tokens_bytes,
    memory,
    sharing_ranks,
    usable_bytes,
)
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.plan.teacher_cost import teacher_bytes

MAX_TOKENS = 1 << 18  # maximum of an automatic microbatch: launches are hidden by then, and larger ones gain nothing
GB = 1e9


def predicts(config: RunConfig) -> bool:
    """True if memory is predicted: for ModernBERT's and ESM-2's layers, but not with a generator or frozen layers."""
    alone = config.objective.generator_of(config.model) is None
    frozen = any(not now.objective.trains_encoder for now in config.in_phase.values())
    return type(config.model) in KEPT and alone and not frozen


def own_rows(phase: PhaseConfig, ranks: int) -> int:
    """Return the rows of the full batch on the rank with the most rows."""
    return -(-phase.batch_rows // ranks)


def phase_memory(
    config: RunConfig, name: str, gpu: HasMemory, strategy: Strategy, ranks: int, microbatch_rows: int
) -> Memory:
    """Predict the memory of one GPU in a phase.

    Args:
        config: the run.
        name: name of the phase.
        gpu: kind of GPU.
        strategy: how ranks share the model.
        ranks: GPUs.
        microbatch_rows: rows of one forward pass.
    """
    objective = config.in_phase[name].objective
    tokens = microbatch_rows * config.phases[name].row_tokens
    shards = sharing_ranks(strategy, ranks, config.distributed.shard_ranks, gpu)
    queries = math.ceil(objective.query_share * tokens) + 32 if objective.query_share else 0
    bf16 = config.compute.precision != "fp32" and gpu.bf16
    is_sparse = objective.compares and "tokens" in objective.heads
    # the same bound as MaskedLM.max_predicted
    max_predicted = None if objective.compares else math.ceil(objective.max_predicted_share * tokens) + 32
    own_tokens = own_rows(config.phases[name], ranks) * config.phases[name].row_tokens
    step_texts = -(-config.phases[name].batch_rows * config.phases[name].row_tokens // TEXT_TOKENS)
    predicted = memory(
        config.model,
        config.compute,
        count_parameters(config.model, config.objective, shards=shards),
        optim=config.optim,
        bf16=bf16,
        strategy=strategy,
        shards=shards,
        ranks=ranks,
        tokens=tokens + queries,
        predicted=tokens if is_sparse else max_predicted,
        step_tokens=own_tokens,
        step_texts=step_texts,
    )
    teacher = teacher_memory(config, name, bf16=bf16, tokens=tokens, shards=shards)
    lora = cast(LabelledConfig, objective).lora if objective.is_labelled else None
    if lora is not None:
        added = adapters_bytes(config.model, lora, bf16, tokens)
        predicted = replace(predicted, layers=predicted.layers + added)
    predicted = replace(predicted, teacher=teacher, compared=_compared(objective, config.model, step_texts, ranks))
    if is_sparse:
        # for the second pass: gradients of the global batch's vectors; a microbatch's vectors, argmax tokens, gradients
        kept = 4 * config.model.vocab_size * (step_texts + 3 * -(-tokens // TEXT_TOKENS))
        predicted = replace(predicted, head=predicted.head + kept)
    if objective.compares and objective.projected_width is not None:
        width, step_tokens = objective.projected_width, config.phases[name].batch_rows * config.phases[name].row_tokens
        kept = 4 * width * own_tokens  # gradients, for the second pass
        predicted = replace(predicted, compared=compared_tokens_bytes(width, step_tokens), head=predicted.head + kept)
    return predicted


def teacher_memory(config: RunConfig, name: str, *, bf16: bool, tokens: int, shards: int) -> int:
    """Predict the memory of a teacher in a phase; 0 if the phase's objective does not use it.

    Args:
        config: the run.
        name: name of the phase.
        bf16: True if the run uses it.
        tokens: tokens of a microbatch.
        shards: ranks that share one copy of the weights.
    """
    chunk = config.compute.logits_at_once(config.model.vocab_size, on_gpu=True, bytes_per_logit=2 if bf16 else 4)
    has_teacher = config.in_phase[name].objective.named_teacher is not None
    return teacher_bytes(
        config.objective,
        bf16=bf16,
        tokens=tokens if has_teacher else 0,
        chunk=chunk if has_teacher else 0,
        compiled=bool(config.compute.compile),
        shards=shards,
    )


def _compared(objective: ObjectiveConfig, model: ModelConfig, texts: int, ranks: int) -> int:
    """Return the bytes of comparing pairs: half of the texts are queries."""
    if not objective.compares:
        return 0
    width = model.vocab_size if "tokens" in objective.heads else model.hidden_size
    symmetric = cast(ContrastiveConfig, objective).symmetric
    return compared_bytes(width, texts, -(-texts // 2 // ranks), -(-texts // 2), symmetric=symmetric)


def configured_memory(config: RunConfig, name: str, gpu: HasMemory, ranks: int) -> Memory:
    """Predict the memory of one GPU in a phase as configured."""
    phase = config.phases[name]
    rows = min(own_rows(phase, ranks), phase.microbatch_rows)
    return phase_memory(config, name, gpu, config.distributed.strategy, ranks, rows)


def max_rows(config: RunConfig, name: str, gpu: HasMemory, strategy: Strategy, ranks: int, row_limit: int) -> int:
    """Return the largest microbatch that fits with a reserve, in rows, up to `row_limit`; 0 if not one row fits."""
    usable = usable_bytes(gpu)
    return bisect_right(
        range(1, row_limit + 1), usable, key=lambda rows: phase_memory(config, name, gpu, strategy, ranks, rows).peak
    )


def even_rows(phase: PhaseConfig, ranks: int, row_limit: int) -> int:
    """Return rows of a microbatch, at most `row_limit`, without a smaller last microbatch, which would be compiled too.

    The same holds in a batch warmup if possible. If even cuts would halve the microbatch, parts are about equal in
    size.
    """
    own = own_rows(phase, ranks)
    row_limit = min(row_limit, own)
    for rank_rows in (math.gcd(*(-(-rows // ranks) for rows in phase.batch_sizes)), own):
        for rows in range(row_limit, row_limit // 2, -1):
            if rank_rows % rows == 0:
                return rows
    return -(-own // -(-own // row_limit))


def microbatches(config: RunConfig, gpu: HasMemory, ranks: int) -> dict[str, int]:
    """Return the automatic microbatches by dotted key: the largest that fit; one row if memory is not predicted."""
    rows = {}
    for name, phase in config.phases.items():
        if phase.microbatch_tokens is None and predicts(config):
            row_limit = min(own_rows(phase, ranks), max(1, MAX_TOKENS // phase.row_tokens))
            fitting = max_rows(config, name, gpu, config.distributed.strategy, ranks, row_limit)
            rows[microbatch_key(name)] = even_rows(phase, ranks, max(1, fitting)) * phase.row_tokens
    return rows


def too_large(config: RunConfig, gpu: HasMemory, ranks: int) -> Iterator[str]:
    """Yield a message for each phase of a closed run that needs more than all of a GPU's memory.

    A teacher that is too large by itself gets the only message.
    """
    strategy, first = config.distributed.strategy, next(iter(config.phases))
    shards = sharing_ranks(strategy, ranks, config.distributed.shard_ranks, gpu)
    bf16 = config.compute.precision != "fp32" and gpu.bf16
    if (alone := teacher_memory(config, first, bf16=bf16, tokens=0, shards=shards)) > gpu.memory_bytes:
        ways = ["distributed.strategy=fsdp2, whose ranks share it"] if ranks > 1 and strategy == "ddp" else []
        ways += [] if bf16 else ["objective.teacher_precision=bf16"]
        yield (
            f"objective.teacher={config.objective.named_teacher}: its weights take {alone / GB:.1f} GB of a GPU, and "
            f"{gpu.label} has {gpu.memory_bytes / GB:.1f} GB. {''.join(f'Set {way}, or ' for way in ways)}"
            f"{'name' if ways else 'Name'} a smaller one."
        )
        return
    if not predicts(config):
        return
    for name in config.phases:
        if (message := does_not_fit(config, name, gpu, ranks, gpu.memory_bytes)) is not None:
            yield message


def does_not_fit(config: RunConfig, name: str, gpu: HasMemory, ranks: int, limit: int) -> str | None:
    """Return a message for a phase that needs more bytes of a GPU than `limit`, with the settings that would fit."""
    phase, needed = config.phases[name], configured_memory(config, name, gpu, ranks).peak
    if needed <= limit:
        return None
    rows = max_rows(config, name, gpu, config.distributed.strategy, ranks, own_rows(phase, ranks))
    ways = [f"{microbatch_key(name)}={even_rows(phase, ranks, rows) * phase.row_tokens}"] if rows else []
    savings = dict(_savings(config, 1 if rows else ranks))  # sharding costs time that smaller microbatches do not

    def fits(settings: Mapping[str, Any]) -> bool:
        return configured_memory(with_settings(config, settings), name, gpu, ranks).peak <= limit

    ways += [assigned(*each) for each in savings.items() if fits(dict([each]))]
    remedy = f"Set {' or '.join(ways)}."
    if not ways and savings and fits(savings):
        remedy = f"Set {' and '.join(assigned(*each) for each in savings.items())}."
    elif not ways:
        remedy = f"Lower phases.{name}.row_tokens, or take a larger GPU."
    usable = "" if limit == gpu.memory_bytes else " usable"
    return (
        f"{microbatch_key(name)}={phase.tokens_at_once}: needs {needed / GB:.1f} GB of a GPU by `plan`, and "
        f"{gpu.label} has {limit / GB:.1f} GB{usable}. {remedy}"
    )


def _savings(config: RunConfig, ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield settings, as key and value, that lower the memory of a run."""
    if not config.compute.compile:
        yield "compute.compile", True
    if not config.compute.activation_checkpointing:
        yield "compute.activation_checkpointing", True
    if ranks > 1 and config.distributed.strategy == "ddp":
        yield "distributed.strategy", "fsdp2"
