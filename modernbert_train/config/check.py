"""Rules that span several fields, one small function each; `check` runs them all and reports every broken one.

A rule yields messages of three parts: the keys with their values, why they cannot be, what to change. Rules see only
the configuration (and the number of ranks when it is known), never a file, a GPU or torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from modernbert_train.config.launch import launch_mistakes
from modernbert_train.config.plugins import GPU_ONLY
from modernbert_train.config.schema import (
    BatchWarmupConfig,
    ModelConfig,
    MuonConfig,
    NorMuonConfig,
    PhaseConfig,
    RunConfig,
    StableAdamWConfig,
)
from modernbert_train.config.stream_rules import one_source, phase_shares, stream_shares
from modernbert_train.errors import ConfigError

Rule = Callable[[RunConfig, int], Iterator[str]]


def check(config: RunConfig, num_ranks: int = 1) -> None:
    """Apply every rule.

    Args:
        config: the loaded run.
        num_ranks: processes that would train.

    Raises:
        ConfigError: one line for each broken rule.
    """
    messages = [message for rule in RULES for message in rule(config, num_ranks)]
    if messages:
        raise ConfigError("\n".join(messages))


def check_model(model: ModelConfig) -> None:
    """Apply the rules that concern the model alone.

    Raises:
        ConfigError: one line for each broken rule.
    """
    config = RunConfig(model=model, optim=StableAdamWConfig(lr=1.0))
    messages = [message for rule in (ranges, model_shape) for message in rule(config, 1)]
    if messages:
        raise ConfigError("\n".join(messages))


def run_name(config: RunConfig, num_ranks: int) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", config.name) or config.name in (".", ".."):
        yield f"name={config.name!r}: a run's name becomes its folder. Use letters, digits, '.', '_' and '-'."


def ranges(config: RunConfig, num_ranks: int) -> Iterator[str]:
    model, data, optim, objective = config.model, config.data, config.optim, config.objective
    positive = {
        "model.vocab_size": model.vocab_size,
        "model.hidden_size": model.hidden_size,
        "model.num_layers": model.num_layers,
        "model.num_heads": model.num_heads,
        "model.intermediate_size": model.intermediate_size,
        "model.global_attn_every_n_layers": model.global_attn_every_n_layers,
        "model.local_attention": model.local_attention,
        "model.local_rope_theta": model.local_rope_theta,
        "model.norm_eps": model.norm_eps,
        "model.init_std": model.init_std,
        "model.init_cutoff": model.init_cutoff,
        "data.packing_window": data.packing_window,
        "data.max_wait_rows": data.max_wait_rows,
        "data.shuffle_block_shards": data.shuffle_block_shards,
        "data.prefetch_batches": data.prefetch_batches,
        "data.worker_timeout_seconds": data.worker_timeout_seconds,
        "data.cache_limit_bytes": data.cache_limit_bytes,
        "data.download_timeout_seconds": data.download_timeout_seconds,
        "optim.lr": optim.lr,
        "optim.eps": optim.eps,
        "checkpoint.keep": config.checkpoint.keep,
        "checkpoint.interval_seconds": config.checkpoint.interval_seconds,
        "checkpoint.interval_steps": config.checkpoint.interval_steps,
        "checkpoint.interval_tokens": config.checkpoint.interval_tokens,
        "eval.times_per_phase": config.eval.times_per_phase,
        "eval.interval_tokens": config.eval.interval_tokens,
        "eval.max_tokens": config.eval.max_tokens,
        "distributed.timeout_seconds": config.distributed.timeout_seconds,
        "stability.spike_deviations": config.stability.spike_deviations,
        "stability.spike_min_rise": config.stability.spike_min_rise,
        "logging.line_seconds": config.logging.line_seconds,
        "profile.steps": None if config.profile is None else config.profile.steps,
        "profile.skip": None if config.profile is None else config.profile.skip,
    }
    for key, value in positive.items():
        if value is not None and not value > 0:
            yield f"{key}={value}: must be above 0."
    for key, value in {
        "data.num_workers": data.num_workers,
        "optim.weight_decay": optim.weight_decay,
        "model.z_loss": model.z_loss,
        "stability.spike_roll_back_batches": config.stability.spike_roll_back_batches,
        "stability.max_skips": config.stability.max_skips,
        "stability.max_roll_backs": config.stability.max_roll_backs,
    }.items():
        if value < 0:
            yield f"{key}={value}: must not be negative."
    if not 0 <= config.seed < 1 << 31:
        yield f"seed={config.seed}: must be at least 0 and below 2,147,483,648, which Composer asks for."
    for key, value, top in (
        ("objective.mask_rate", objective.mask_rate, 1.0),
        ("objective.eval_mask_rate", objective.eval_mask_rate, 1.0),
    ):
        if not 0 < value <= top:
            yield f"{key}={value}: a share of the tokens, above 0 and at most 1. The published recipe uses 0.3."
    if not 0 <= model.attention_out_dropout < 1:
        yield f"model.attention_out_dropout={model.attention_out_dropout}: must be at least 0 and below 1."
    shares = (objective.mask_token_share, objective.random_token_share)
    if min(shares) < 0 or sum(shares) > 1:
        yield (
            f"objective.mask_token_share={shares[0]} and objective.random_token_share={shares[1]}: "
            "both are shares of the predicted tokens. Their sum must lie between 0 and 1."
        )
    for index, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            yield f"optim.betas[{index}]={beta}: must be at least 0 and below 1."


def muon(config: RunConfig, num_ranks: int) -> Iterator[str]:
    optim = config.optim
    if not isinstance(optim, MuonConfig):
        return
    betas = {"momentum": optim.momentum}
    if isinstance(optim, NorMuonConfig):
        betas["row_beta"] = optim.row_beta
    for key, value in betas.items():
        if not 0 <= value < 1:
            yield f"optim.{key}={value}: must be at least 0 and below 1. Usual is 0.95."
    iterations = optim.newton_schulz_iterations
    if iterations < 1:
        yield f"optim.newton_schulz_iterations={iterations}: without one nothing is orthogonalised. Usual are 5."
    if not optim.adam_lr_ratio > 0:
        yield f"optim.adam_lr_ratio={optim.adam_lr_ratio}: must be above 0; 1 is the matrices' own rate."
    if optim.adam_decay_ratio < 0:
        yield f"optim.adam_decay_ratio={optim.adam_decay_ratio}: must not be negative; 0 leaves embeddings undecayed."


def model_shape(config: RunConfig, num_ranks: int) -> Iterator[str]:
    model = config.model
    if min(model.hidden_size, model.num_heads, model.global_attn_every_n_layers) < 1:
        return
    if model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}. "
            f"Change one of them; heads of 64 are usual: model.num_heads={max(1, model.hidden_size // 64)}."
        )
    elif model.head_size % 2:
        yield f"model.hidden_size/num_heads={model.head_size}: rotary embeddings turn pairs. Make it even."
    if model.local_attention % 2:
        yield f"model.local_attention={model.local_attention}: half the window lies on each side. Make it even."
    every = model.global_attn_every_n_layers
    if (model.num_layers - 1) % every:
        below = (model.num_layers - 1) // every * every + 1
        yield (
            f"model.num_layers={model.num_layers} with model.global_attn_every_n_layers={every} ends in a local layer, "
            f"and the last must see the whole sequence. Use {below} or {below + every} layers."
        )


def one_origin(config: RunConfig, num_ranks: int) -> Iterator[str]:
    model = config.model
    if model.init_from is not None and model.grow_from is not None:
        yield (
            f"model.init_from={model.init_from} and model.grow_from={model.grow_from}: both would give the first "
            "weights. Keep init_from for a model of this size, grow_from for a smaller one."
        )
    key, other = ("init_from", model.init_from) if model.grow_from is None else ("grow_from", model.grow_from)
    if config.start is not None and other is not None:
        yield (
            f"start.checkpoint={config.start.checkpoint} and model.{key}={other}: both would give the first weights. "
            f"Keep start to go on from a checkpoint, model.{key} for weights alone."
        )


def phases_present(config: RunConfig, num_ranks: int) -> Iterator[str]:
    if not config.phases:
        yield "phases: empty, so there is nothing to train. Add one; yamls/quickstart.yaml shows three."


def phase_numbers(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, phase in config.phases.items():
        here = f"phases.{name}"
        numbers = {
            "tokens": phase.tokens,
            "batch_rows": phase.batch_rows,
            "microbatch_tokens": phase.microbatch_tokens,
            "global_rope_theta": phase.global_rope_theta,
            "lr_ratio": phase.lr_ratio,
        }
        for key, value in numbers.items():
            if value <= 0:
                yield f"{here}.{key}={value}: must be above 0."
        if phase.local_rope_theta is not None and not phase.local_rope_theta > 0:
            yield f"{here}.local_rope_theta={phase.local_rope_theta}: must be above 0. Remove it for the model's."
        if phase.row_tokens < 8:
            yield f"{here}.row_tokens={phase.row_tokens}: at least 8, for text between [CLS] and [SEP]."
        if phase.weight_decay is not None and phase.weight_decay < 0:
            yield f"{here}.weight_decay={phase.weight_decay}: must not be negative."
        if phase.mask_rate is not None and not 0 < phase.mask_rate <= 1:
            yield f"{here}.mask_rate={phase.mask_rate}: a share of the tokens, above 0 and at most 1."
        if phase.row_tokens >= 8 and phase.microbatch_tokens % phase.row_tokens:
            near = max(1, phase.microbatch_tokens // phase.row_tokens) * phase.row_tokens
            yield (
                f"{here}.microbatch_tokens={phase.microbatch_tokens} is not a multiple of {here}.row_tokens="
                f"{phase.row_tokens}, and a microbatch is whole rows. Set it to {near}."
            )


def phase_schedule(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, phase in config.phases.items():
        schedule, here = phase.schedule, f"phases.{name}"
        if min(schedule.warmup_tokens, schedule.decay_tokens) < 0:
            yield f"{here}.schedule: warmup_tokens and decay_tokens must not be negative."
        elif schedule.warmup_tokens + schedule.decay_tokens > phase.tokens:
            yield (
                f"{here}.schedule: warmup_tokens={schedule.warmup_tokens} and decay_tokens={schedule.decay_tokens} "
                f"do not fit into {here}.tokens={phase.tokens}. Shorten them or lengthen the phase."
            )
        if not 0 <= schedule.final_lr_ratio <= 1:
            yield f"{here}.schedule.final_lr_ratio={schedule.final_lr_ratio}: must lie between 0 and 1."
        if schedule.plateau == "inverse_sqrt" and schedule.warmup_tokens < 1:
            yield (
                f"{here}.schedule.plateau=inverse_sqrt: falls from the end of the warmup on, and "
                f"{here}.schedule.warmup_tokens={schedule.warmup_tokens}. Set warmup_tokens above 0."
            )
        elif schedule.plateau == "inverse_sqrt" and 0 < schedule.decay_tokens < phase.tokens:
            reached = (schedule.warmup_tokens / (phase.tokens - schedule.decay_tokens)) ** 0.5
            if schedule.final_lr_ratio > reached:
                yield (
                    f"{here}.schedule.final_lr_ratio={schedule.final_lr_ratio}: the rate has fallen to {reached:.3g} "
                    "of its peak when the decay begins, which would raise it again. Lower it, or decay earlier."
                )


def phase_batch(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, phase in config.phases.items():
        here = f"phases.{name}"
        warmup = phase.batch_warmup
        if warmup is not None:
            if min(warmup.start_rows, warmup.step_rows, warmup.tokens) < 1:
                yield f"{here}.batch_warmup: start_rows, step_rows and tokens must be above 0."
                continue
            if warmup.start_rows >= phase.batch_rows:
                yield (
                    f"{here}.batch_warmup.start_rows={warmup.start_rows} is not below {here}.batch_rows="
                    f"{phase.batch_rows}. Lower it, or remove batch_warmup."
                )
            if warmup.tokens > phase.tokens:
                yield (
                    f"{here}.batch_warmup.tokens={warmup.tokens} exceeds {here}.tokens={phase.tokens}: the full batch "
                    "would never be reached. Shorten the warmup."
                )
        yield from _divisible(here, phase, warmup, num_ranks)


def _divisible(here: str, phase: PhaseConfig, warmup: BatchWarmupConfig | None, num_ranks: int) -> Iterator[str]:
    uneven = [rows for rows in phase.batch_sizes if rows % num_ranks]
    if uneven:
        near = max(1, phase.batch_rows // num_ranks) * num_ranks
        hint = f"Set {here}.batch_rows={near}" + (
            f" and start_rows and step_rows to multiples of {num_ranks}." if warmup else "."
        )
        yield (
            f"{here}: a global batch of {uneven[0]} rows cannot be shared evenly by {num_ranks} ranks, and every rank "
            f"must make the same number of rows. {hint}"
        )


def validation_rows(config: RunConfig, num_ranks: int) -> Iterator[str]:
    rows = config.eval.row_tokens
    if rows is not None and rows < 8:
        yield f"eval.row_tokens={rows}: at least 8, for text between [CLS] and [SEP]."
    for key in ("times_per_phase", "interval_tokens"):
        if getattr(config.eval, key) is not None and config.data.validation is None:
            yield f"eval.{key} is set but data.validation is not. Name the held-out shards or remove eval.{key}."
    if config.eval.times_per_phase is not None and config.eval.interval_tokens is not None:
        yield (
            f"eval.times_per_phase={config.eval.times_per_phase} and eval.interval_tokens="
            f"{config.eval.interval_tokens}: both would say when to validate. Remove one of them."
        )


def worker_patience(config: RunConfig, num_ranks: int) -> Iterator[str]:
    data = config.data
    if 0 < data.worker_timeout_seconds <= 2 * data.download_timeout_seconds and data.num_workers > 0:
        yield (
            f"data.worker_timeout_seconds={data.worker_timeout_seconds} is not above twice "
            f"data.download_timeout_seconds={data.download_timeout_seconds}: a worker that waits for a remote shard, "
            f"which may be fetched twice, would count as hung. Raise it to {3 * data.download_timeout_seconds}."
        )


def precision_and_device(config: RunConfig, num_ranks: int) -> Iterator[str]:
    if config.device == "cpu" and config.precision == "bf16":
        yield "precision=bf16 with device=cpu: Composer trains in fp32 on CPUs. Set precision=auto or fp32."
    kernels = {"model.attention": config.model.attention, "model.global_attention": config.model.global_attention}
    for key, kernel in kernels.items():
        if config.device == "cpu" and kernel in ("varlen", "flash", "flex"):
            yield f"{key}={kernel} with device=cpu: that kernel needs a GPU. Set {key}=auto or sdpa."
    if config.device == "cpu" and getattr(config.optim, "fused", False):
        yield "optim.fused=true with device=cpu: those kernels need a GPU. Set optim.fused=false."
    for name in GPU_ONLY:
        if config.device == "cpu" and name in config.callbacks:
            yield f"callbacks.{name} with device=cpu: it measures GPUs only. Set callbacks.{name}=false."


def sharding(config: RunConfig, num_ranks: int) -> Iterator[str]:
    strategy, shard_ranks = config.distributed.strategy, config.distributed.shard_ranks
    here = f"distributed.shard_ranks={shard_ranks}"
    if strategy != "hsdp":
        if shard_ranks is not None:
            yield f"{here} with distributed.strategy={strategy}: only hsdp divides the ranks. Remove it, or set hsdp."
    elif shard_ranks is None:
        yield (
            "distributed.strategy=hsdp without distributed.shard_ranks: how many ranks share one copy of the weights? "
            "Usually those of one machine: distributed.shard_ranks=8."
        )
    elif shard_ranks < 2:
        yield f"{here}: a copy on each rank is distributed.strategy=ddp. Use that, or at least 2."
    elif num_ranks > 1 and num_ranks % shard_ranks:
        yield f"{here} does not divide {num_ranks} ranks into equal groups. Use a divisor of {num_ranks}, or fsdp2."


def stability(config: RunConfig, num_ranks: int) -> Iterator[str]:
    window = config.stability.spike_window_batches
    if window < 8:
        yield f"stability.spike_window_batches={window}: a spread of so few losses means nothing. Use at least 8."


def launch(config: RunConfig, num_ranks: int) -> Iterator[str]:
    yield from launch_mistakes(config.launch)


RULES: tuple[Rule, ...] = (
    run_name,
    ranges,
    muon,
    model_shape,
    one_origin,
    phases_present,
    phase_numbers,
    phase_schedule,
    phase_batch,
    one_source,
    stream_shares,
    phase_shares,
    validation_rows,
    worker_patience,
    precision_and_device,
    sharding,
    launch,
    stability,
)
