"""Rules for a run's configuration, one small function each; `check` runs all of them and reports every broken one. The
bounds of a single field are written at the field, see knob.py; the rules here compare several fields.

A rule yields messages of three parts: the keys with their values, the reason, the remedy. Rules read only the
configuration (and the number of ranks if it is known), never a file, a GPU or torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from modernbert_train.config.callbacks import GPU_ONLY
from modernbert_train.config.knob import bound_mistakes, facts_of, refuse_too_many
from modernbert_train.config.launch import launch_mistakes
from modernbert_train.config.model import CUDNN_HEADS, TILE_HEADS, Bias
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    BatchWarmupConfig,
    ModelConfig,
    ModernBertConfig,
    ObjectiveConfig,
    PhaseConfig,
    RunConfig,
)
from modernbert_train.config.stream_rules import one_source, phase_shares, stream_shares
from modernbert_train.core.text import first_line, is_folder_name
from modernbert_train.errors import ConfigError

# kernel -> supported orders; models/attention checks device and precision
KERNEL_ORDERS: dict[str, tuple[Order, ...]] = {
    "varlen": ("all", "causal"),
    "flash": ("all", "causal"),
    "tiles": ("all", "causal"),
    "cudnn": ("all", "causal"),
    "flex": ("all", "causal", "given"),
    "sdpa": ("all", "causal", "given"),
}

# bias of a model's attention scores -> kernels that support it
BIAS_KERNELS: dict[Bias, tuple[str, ...]] = {"sequences": ("sdpa",), "pairs": ("flex", "sdpa")}

Rule = Callable[[RunConfig, int], Iterator[str]]


def check(config: RunConfig, num_ranks: int = 1) -> None:
    """Apply every rule.

    Args:
        config: the loaded run.
        num_ranks: processes that will train.

    Raises:
        ConfigError: a rule is broken; one line for each.
    """
    refuse_too_many(config)
    messages = [message for rule in RULES for message in rule(config, num_ranks)]
    if messages:
        raise ConfigError("\n".join(messages))


def run_name(config: RunConfig, num_ranks: int) -> Iterator[str]:
    if not is_folder_name(config.name):
        yield f"name={config.name!r}: a run's name becomes its folder. Use letters, digits, '.', '_' and '-'."


def bounds(config: RunConfig, num_ranks: int) -> Iterator[str]:
    """Check every number against the bounds at its field; see knob.py."""
    yield from bound_mistakes(config)
    for name, phase in config.phases.items():
        for section in phase.overridden:
            now = getattr(config.in_phase[name], section)  # may be another variant than the run's
            facts = {field.name: facts_of(field) for field in fields(now)}
            for key, value in getattr(phase, section).items():
                yield from facts[key].mistakes(f"phases.{name}.{section}.{key}", value)


def objectives_of_phases(config: RunConfig, num_ranks: int) -> Iterator[str]:
    """Phases may change the objective if text is packed the same way and the encoder has the needed heads."""
    own = config.objective
    for name, now in config.in_phase.items():
        other = now.objective
        lesser = ("tokens",) if own.named_teacher is not None or own.heads[-1] == "tokens" else own.heads
        if other.special_tokens != own.special_tokens or other.heads not in (own.heads, own.idle_heads, lesser):
            remedy = "Make it a separate run with weights.init_from."
            if own.token_head_key is not None and other.heads == ("tokens",):
                remedy = f"Set objective.{own.token_head_key}=true, or make it a separate run with weights.init_from."
            elif other.named_teacher is not None and own.heads == ("tokens",):
                remedy = (
                    f"Set objective={{name: {other.name}, ...}} for the run, whose model is built for it, and "
                    f"objective={{name: {own.name}}} in the phases of that."
                )
            elif other.token_head_key is not None and own.heads == ("tokens",):
                remedy = (
                    f"Set objective={{name: {other.name}, {other.token_head_key}: true}} for the run, whose model is "
                    f"built for it, and objective={{name: {own.name}}} in its phases; or make it a separate run with "
                    "weights.init_from."
                )
            yield (
                f"phases.{name}.objective.name={other.name}: cannot follow objective.name={own.name} in one run, since "
                f"it has {other.special_tokens} special tokens a sequence and the heads {', '.join(other.heads)}, not "
                f"{own.special_tokens} and {', '.join(own.heads)}. {remedy}"
            )


def kinds(config: RunConfig, num_ranks: int) -> Iterator[str]:
    """Check the model and the objective by their own rules, in the run and in each phase."""
    model, reported = config.model, set[str]()
    if min(model.hidden_size, model.num_heads) > 0 and model.hidden_size % model.num_heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not a multiple of model.num_heads={model.num_heads}. "
            f"Change one of them; heads of 64 are usual: model.num_heads={max(1, model.hidden_size // 64)}."
        )
        return
    for here, now in (("", config), *((f"phases.{name}.", now) for name, now in config.in_phase.items())):
        if _outside("model", now.model):
            continue
        model = f"model.name={now.model.name}"
        objective = f"objective.name={now.objective.name}"
        messages = _answer(model, now.model.mistakes)
        if not messages and not _outside("objective", now.objective):
            messages = [
                *_answer(model, now.model.mistakes_in_run, now.objective, from_scratch=config.from_scratch),
                *_answer(objective, now.objective.mistakes, now.model),
                *_answer(objective, now.objective.mistakes_after, config.objective),
            ]
        yield from (here + message for message in messages if message not in reported)
        reported.update(messages)


def _answer(key: str, mistakes: Callable[..., Any], *arguments: Any, **more: Any) -> list[str]:
    """Return the mistakes that a method of a section finds; if a plugin's method fails, that is one."""
    try:
        answer = mistakes(*arguments, **more)
        messages = [answer] if isinstance(answer, str) else [*answer]
        if others := [each for each in messages if not isinstance(each, str)]:
            raise TypeError(f"yields {others[0]!r} and not a text")
    except Exception as error:  # a plugin may raise any
        module, name = mistakes.__module__, mistakes.__qualname__
        if module.startswith("modernbert_train."):
            raise
        return [f"{key}: {module}.{name} of the plugin fails: {type(error).__name__}: {first_line(error)}. Fix it."]
    return messages


def _outside(section: str, config: ModelConfig | ObjectiveConfig) -> bool:
    """Return True if one of its numbers is out of bounds, which `bounds` reports."""
    return any(bound_mistakes(config, (section,)))


def one_origin(config: RunConfig, num_ranks: int) -> Iterator[str]:
    weights = config.weights
    if len(weights.named) > 1:
        (key, name), (second, other), *_ = weights.named.items()
        yield (
            f"weights.{key}={name} and weights.{second}={other}: both define the first weights. Keep init_from for "
            "a model of this size, grow_from for a smaller one, shrink_from for a larger one."
        )
    if weights.vocabulary != "same" and weights.init_from is None and weights.shrink_from is None:
        yield (
            f"weights.vocabulary={weights.vocabulary}: only weights of weights.init_from and weights.shrink_from get "
            "another vocabulary. Name a model there, or remove the key."
        )
    for key, name in weights.named.items():
        if key != "init_from" and config.objective.generator_of(config.model) is not None:
            yield (
                f"weights.{key}={name} with objective.name={config.objective.name}: only masked-language models are "
                f"{'grown' if key == 'grow_from' else 'shrunk'}. Train such a model first, and name it as "
                "weights.init_from."
            )
    if config.start is not None and weights.named:
        key, other = next(iter(weights.named.items()))
        yield (
            f"start.checkpoint={config.start.checkpoint} and weights.{key}={other}: both define the first weights. "
            f"Keep start to continue from a checkpoint, weights.{key} to use only its weights."
        )


def positions(config: RunConfig, num_ranks: int) -> Iterator[str]:
    """Rows must not be longer than the model's positions."""
    bounds = {name: now.model.max_positions for name, now in config.in_phase.items() if now.model.max_positions}
    for name, limit in bounds.items():
        phase = config.phases[name]
        objective = config.in_phase[name].objective
        if phase.row_tokens > limit and not objective.has_shorter_sequences(limit):
            here = f"phases.{name}"
            fitting = phase.tokens_at_once // limit * limit or limit
            yield (
                f"{here}.row_tokens={phase.row_tokens} exceeds model.max_positions={limit}, and a sequence may fill "
                f"its row. Set {here}.row_tokens={limit} and {here}.microbatch_tokens={fitting}, or raise "
                f"model.max_positions to {phase.row_tokens}."
            )
    if bounds and config.eval.row_tokens is not None and config.eval.row_tokens > (limit := min(bounds.values())):
        yield (
            f"eval.row_tokens={config.eval.row_tokens} exceeds model.max_positions={limit}, and a sequence may fill "
            "its row. Remove eval.row_tokens, so that the phase's is used, or lower it."
        )


def labelled(config: RunConfig, num_ranks: int) -> Iterator[str]:
    """Labelled objectives predict no tokens, so held-out text cannot measure them."""
    validation, objective = config.data.validation, config.objective
    if objective.is_labelled and validation is not None:
        yield (
            f"data.validation={validation} with objective.name={objective.name}: validation predicts tokens, which "
            "this objective does not. Remove it; labelled texts are measured by evals, with name: scores."
        )


def kernels_and_orders(config: RunConfig, num_ranks: int) -> Iterator[str]:
    """Kernel and encoder must support the order of every phase; the kernels check this machine later."""
    compute = config.compute
    for key, kernel in {"attention": compute.attention, "global_attention": compute.global_attention}.items():
        if kernel is None or kernel == "auto":
            continue
        bias = config.model.score_bias
        if bias and kernel not in BIAS_KERNELS[bias]:
            yield (
                f"compute.{key}={kernel} with model.name={config.model.name}: this model adds a bias to attention "
                f"scores, which the kernel does not support. Set compute.{key}=auto, or "
                f"{' or '.join(BIAS_KERNELS[bias])}."
            )
            continue
        if bias and kernel == "flex" and compute.deterministic:
            yield (
                f"compute.{key}=flex with model.name={config.model.name} and compute.deterministic=true: that kernel "
                f"sums gradients of distances in no fixed order. Set compute.{key}=auto, which uses sdpa."
            )
            continue
        if kernel == "tiles" and config.model.head_size not in TILE_HEADS:
            yield (
                f"compute.{key}={kernel} with heads of {config.model.head_size}: that kernel supports heads of "
                f"{', '.join(map(str, TILE_HEADS))}. Set compute.{key}=auto."
            )
        if kernel == "cudnn" and config.model.head_size not in CUDNN_HEADS:
            yield (
                f"compute.{key}={kernel} with heads of {config.model.head_size}: cuDNN supports multiples of 8 up to "
                f"{CUDNN_HEADS[-1]}. Set compute.{key}=auto."
            )
        if kernel == "cudnn" and compute.deterministic:
            yield (
                f"compute.{key}={kernel} with compute.deterministic=true: cuDNN's backward pass sums in no fixed "
                f"order. Set compute.{key}=varlen."
            )
        for name, now in config.in_phase.items():
            order = now.objective.order
            if order not in KERNEL_ORDERS[kernel]:
                able = ", ".join(each for each, orders in KERNEL_ORDERS.items() if order in orders)
                yield (
                    f"compute.{key}={kernel} with objective.name={now.objective.name} in phases.{name}: that kernel "
                    f"does not support order {order}. Set compute.{key}=auto, or one of {able}."
                )
                break


def phases_present(config: RunConfig, num_ranks: int) -> Iterator[str]:
    if not config.phases:
        yield "phases: empty, so there is nothing to train. Add one; yamls/quickstart.yaml shows three."


def phase_microbatch(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, phase in config.phases.items():
        here = f"phases.{name}"
        if phase.row_tokens >= 8 and phase.tokens_at_once % phase.row_tokens:
            near = max(1, phase.tokens_at_once // phase.row_tokens) * phase.row_tokens
            yield (
                f"{here}.microbatch_tokens={phase.microbatch_tokens} is not a multiple of {here}.row_tokens="
                f"{phase.row_tokens}, and a microbatch is whole rows. Set it to {near}."
            )


def phase_schedule(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, phase in config.phases.items():
        schedule, here = phase.schedule, f"phases.{name}"
        if schedule.warmup_tokens + schedule.decay_tokens > phase.tokens:
            yield (
                f"{here}.schedule: warmup_tokens={schedule.warmup_tokens} and decay_tokens={schedule.decay_tokens} "
                f"do not fit into {here}.tokens={phase.tokens}. Shorten them or lengthen the phase."
            )
        if schedule.plateau == "inverse_sqrt" and schedule.warmup_tokens < 1:
            yield (
                f"{here}.schedule.plateau=inverse_sqrt: the learning rate falls from the end of the warmup, and "
                f"{here}.schedule.warmup_tokens={schedule.warmup_tokens}. Set warmup_tokens above 0."
            )
        elif schedule.plateau == "inverse_sqrt" and 0 < schedule.decay_tokens < phase.tokens:
            reached = (schedule.warmup_tokens / (phase.tokens - schedule.decay_tokens)) ** 0.5
            if schedule.final_lr_ratio > reached:
                yield (
                    f"{here}.schedule.final_lr_ratio={schedule.final_lr_ratio}: the learning rate has fallen to "
                    f"{reached:.3g} of its peak when the decay begins, which would raise it. Lower it, or decay "
                    "earlier."
                )


def phase_batch(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, phase in config.phases.items():
        here = f"phases.{name}"
        warmup = phase.batch_warmup
        if warmup is not None:
            if min(warmup.start_rows, warmup.step_rows, warmup.tokens) < 1:
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
            f"{here}: a global batch of {uneven[0]} rows cannot be divided evenly among {num_ranks} ranks, and every "
            f"rank must compute the same number of rows. {hint}"
        )


def streams(config: RunConfig, num_ranks: int) -> Iterator[str]:
    yield from one_source(config.data)
    yield from stream_shares(config.data)
    yield from phase_shares(config.data, config.phases)


def validation_rows(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for key in ("times_per_phase", "interval_tokens"):
        if getattr(config.eval, key) is not None and config.data.validation is None:
            yield f"eval.{key} is set but data.validation is not. Name the held-out shards or remove eval.{key}."
    if config.eval.times_per_phase is not None and config.eval.interval_tokens is not None:
        yield (
            f"eval.times_per_phase={config.eval.times_per_phase} and eval.interval_tokens="
            f"{config.eval.interval_tokens}: both define when to validate. Remove one of them."
        )


def evaluations(config: RunConfig, num_ranks: int) -> Iterator[str]:
    for name, settings in config.evals.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            yield f"evals.{name}: the name is used in metrics. Use at most 40 letters, digits, '_' and '-'."
        elif name == "heldout":
            yield "evals.heldout: this name is reserved for the held-out text of section eval. Choose another."
        here = f"evals.{name}"
        yield from _answer(f"{here}.name={settings.name}", settings.mistakes, here, config.objective)


def worker_patience(config: RunConfig, num_ranks: int) -> Iterator[str]:
    data = config.data
    if 0 < data.worker_timeout_seconds <= 2 * data.download_timeout_seconds and data.workers > 0:
        yield (
            f"data.worker_timeout_seconds={data.worker_timeout_seconds} is not above twice "
            f"data.download_timeout_seconds={data.download_timeout_seconds}: a worker that waits for a remote shard, "
            f"which may be fetched twice, would count as hung. Raise it to {3 * data.download_timeout_seconds}."
        )


def residual_precision(config: RunConfig, num_ranks: int) -> Iterator[str]:
    compute, here = config.compute, "compute.residual_precision=bf16"
    if compute.residual_precision == "fp32":
        return
    if not isinstance(config.model, ModernBertConfig):
        yield f"{here} with model.name={config.model.name}: only ModernBERT supports it. Set it to fp32."
    if compute.precision == "fp32" or (compute.precision == "auto" and compute.device == "cpu"):
        yield (
            f"{here} with compute.precision={compute.precision}: products are in fp32 then, and rounding the residual "
            "saves nothing. Set compute.precision=bf16, or compute.residual_precision=fp32."
        )


def search(config: RunConfig, num_ranks: int) -> Iterator[str]:
    compute = config.compute
    if compute.search and (compute.compile is False or compute.device == "cpu"):
        yield search_refused(compiled=compute.compile is not False)


def search_refused(*, compiled: bool) -> str:
    """Return the message for compute.search=true if no GPU kernel is generated."""
    if not compiled:
        return (
            "compute.search=true without compute.compile: it tunes the kernels that torch.compile generates. Set "
            "compute.compile=true, or compute.search=false."
        )
    return "compute.search=true on a CPU: it only tunes kernels of GPUs. Set compute.search=false."


def precision_and_device(config: RunConfig, num_ranks: int) -> Iterator[str]:
    compute = config.compute
    if compute.device != "cpu":
        return
    kernels = {"compute.attention": compute.attention, "compute.global_attention": compute.global_attention}
    for key, kernel in kernels.items():
        if kernel in ("varlen", "flash", "flex", "tiles", "cudnn"):
            yield f"{key}={kernel} with compute.device=cpu: that kernel needs a GPU. Set {key}=auto or sdpa."
    if config.optim.fused:
        yield "optim.fused=true with compute.device=cpu: those kernels need a GPU. Set optim.fused=false."
    for name in GPU_ONLY:
        if name in config.callbacks:
            yield f"callbacks.{name} with compute.device=cpu: it measures GPUs only. Set callbacks.{name}=false."


def sharding(config: RunConfig, num_ranks: int) -> Iterator[str]:
    strategy, shard_ranks = config.distributed.strategy, config.distributed.shard_ranks
    here = f"distributed.shard_ranks={shard_ranks}"
    if strategy != "hsdp":
        if shard_ranks is not None:
            yield f"{here} with distributed.strategy={strategy}: only hsdp groups the ranks. Remove it, or set hsdp."
    elif shard_ranks is None:
        yield (
            "distributed.strategy=hsdp without distributed.shard_ranks: how many ranks share one replica? "
            "Usually the ranks of one machine: distributed.shard_ranks=8."
        )
    elif shard_ranks < 2:
        yield f"{here}: a replica on each rank is distributed.strategy=ddp. Use that, or at least 2."
    elif num_ranks > 1 and num_ranks % shard_ranks:
        yield f"{here} does not divide {num_ranks} ranks into equal groups. Use a divisor of {num_ranks}, or fsdp2."


def launch(config: RunConfig, num_ranks: int) -> Iterator[str]:
    yield from launch_mistakes(config.launch)


RULES: tuple[Rule, ...] = (
    run_name,
    bounds,
    objectives_of_phases,
    kinds,
    positions,
    labelled,
    kernels_and_orders,
    one_origin,
    phases_present,
    phase_microbatch,
    phase_schedule,
    phase_batch,
    streams,
    validation_rows,
    evaluations,
    worker_patience,
    residual_precision,
    search,
    precision_and_device,
    sharding,
    launch,
)
