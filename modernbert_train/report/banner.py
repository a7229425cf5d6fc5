"""The first lines of a run, in at most 40: model, phases, data, machines, start and folder; and its last lines.

Steps and FLOPs come from `plan`, which walks the document lengths. It takes about a second for a run so small that
every batch is planned, less for others.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import torch

from modernbert_train.config.describe import advice
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.text import plural, rate, table, tokens_text
from modernbert_train.core.versions import untested
from modernbert_train.data.check_shards import few_predictions, unread_rows
from modernbert_train.data.facts import DataFacts
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.transport import find_transport
from modernbert_train.models.attention import choose_kernel, configured_for_global_layers, with_backend
from modernbert_train.plan.census import census
from modernbert_train.plan.make import Plan, make_plan
from modernbert_train.report.training_loss import LOSS_STEPS

_MAX_PHASES, _MAX_STREAMS = 10, 12  # maximum number of lines for each
_HASH = 12  # characters shown of a hash, as in messages that compare two


def banner(
    config: RunConfig,
    *,
    origin: str,
    teacher: str | None = None,
    vocabulary: Sequence[str] = (),
    facts: DataFacts,
    compute: Compute,
    speed: Sequence[str] = (),
    ranks: int,
    ranks_per_node: int,
) -> str:
    """Return the lines, without a newline at the end.

    Args:
        config: the checked run.
        origin: checkpoint or weights that it starts from.
        teacher: of the objective, if any.
        vocabulary: lines on the effect of another vocabulary on the text.
        facts: of its data, checked.
        compute: of this rank.
        speed: lines on its settings of speed, see plan/speed_settings.py.
        ranks, ranks_per_node: of the run.
    """
    plan = make_plan(config, ranks, facts=facts)
    about = "" if plan.exact else "about "
    parameters, model = plan.parameters, config.model
    flops = sum(phase.tokens * phase.flops.training for phase in plan.phases)
    lines = [
        f"{config.name}: {parameters.total:,} parameters, {config.total_tokens:,} tokens, {about}{plan.steps:,} steps, "
        f"{rate(flops)} FLOPs",
        f"  model   {model.num_layers} layers ({census(model).num_global} global) of width {model.hidden_size}; "
        f"{parameters.embedding:,} of the parameters are embeddings",
        *_phases(plan),
        f"  on      {_machines(config, compute.device, ranks, ranks_per_node)}, "
        f"{'bf16 autocast over fp32 weights' if compute.bf16 else compute.precision}",
        *_network(compute.device, ranks, ranks_per_node),
        f"  kernels {_kernels(plan, compute)}",
        *([f"  torch   {text}"] if (text := untested(torch.__version__)) else []),
        *(f"  speed   {text}" for text in speed),
        *_streams(facts),
        f"  vocab   {config.data.tokenizer}, hash {facts.vocabulary.sha256[:_HASH]}",
        f"  eval    {_validations(config, plan)}",
        f"  from    {origin}",
        *(f"          {text}" for text in vocabulary),
        *([] if teacher is None else [f"  teacher {teacher}"]),
        f"  folder  {config.folder}",
        f"  saves   {_saves(config)}",
        *(f"  advice  {text}" for text in advice(config.model, config.optim, config.weights, config.phases)),
        *(
            f"  warning {text}"
            for text in (few_predictions(config, facts), unread_rows(config, facts))
            if text is not None
        ),
    ]
    return "\n".join(lines)


def _phases(plan: Plan) -> list[str]:
    rows = [("  phase", "tokens", "row", "batch rows", "microbatch", "steps", "FLOPs/token")]
    for phase in plan.phases[:_MAX_PHASES]:
        first = min(part.rows for part in phase.ranges) if phase.ranges else phase.config.batch_rows
        last = phase.config.batch_rows
        rows.append(
            (
                f"  {phase.name}",
                f"{phase.config.tokens:,}",
                f"{phase.config.row_tokens:,}",
                f"{last:,}" if first == last else f"{first:,} to {last:,}",
                f"{phase.config.tokens_at_once:,}",
                f"{phase.steps:,}",
                f"{rate(phase.flops.training)}",
            )
        )
    lines = table(rows, numbers=True).split("\n")
    return [*lines, *_rest(len(plan.phases) - _MAX_PHASES, "phases")]


def _validations(config: RunConfig, plan: Plan) -> str:
    if config.data.validation is None:
        return "nothing is held out"
    about = "" if plan.exact else "about "
    of = "" if plan.validation_tokens is None else f" of {tokens_text(plan.validation_tokens)} tokens"
    return f"{config.data.validation}, {about}{plural(plan.validations, 'validation')}{of}"


def _machines(config: RunConfig, device: torch.device, ranks: int, ranks_per_node: int) -> str:
    cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if cuda else f"cpu ({plural(torch.get_num_threads(), 'thread')})"
    nodes = -(-ranks // ranks_per_node)
    spread = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{ranks} x {kind}{spread}{f', {config.distributed.strategy}' if ranks > 1 else ''}"


def _network(device: torch.device, ranks: int, ranks_per_node: int) -> list[str]:
    if device.type != "cuda" or ranks <= ranks_per_node:
        return []
    return [f"  network {find_transport(os.environ).text}"]


def _kernels(plan: Plan, compute: Compute) -> str:
    """Return the attention kernels of this device, chosen by the same calls as in the model."""
    compute_config, dtype = plan.config.compute, torch.bfloat16 if compute.bf16 else torch.float32
    global_name, global_key = configured_for_global_layers(compute_config)
    all_global = plan.census.num_global == len(plan.census.windows)
    kernels = []  # for each phase, since another objective may need another kernel
    for phase in plan.phases:
        order = phase.objective.order
        bias = plan.config.model.score_bias
        kernel = choose_kernel(global_name, compute.device, dtype, global_key, order, bias)
        global_kernel = local_kernel = with_backend(kernel, compute.device, dtype)
        if not all_global:
            heads = plan.config.model.local_heads
            kernel = choose_kernel(compute_config.attention, compute.device, dtype, order=order, local_heads=heads)
            local_kernel = with_backend(kernel, compute.device, dtype)
        kernels.append(
            global_kernel
            if global_kernel == local_kernel
            else f"{global_kernel} in global layers, {local_kernel} in local ones"
        )
    names = "; then ".join(dict.fromkeys(kernels))
    extras = [
        *(["compiled"] * bool(compute_config.compile)),
        *(["recomputed in the backward pass"] * compute_config.activation_checkpointing),
    ]
    same = ["deterministic"] * (compute_config.deterministic and compute.device.type == "cuda")
    return ", ".join([names, *(extras or ["not compiled"]), *same])


def _streams(facts: DataFacts) -> list[str]:
    lines = []
    for name, folder in list(facts.streams.items())[:_MAX_STREAMS]:
        title = "" if folder.key == "data.train" else f"{name}: "
        lines.append(
            f"  data    {title}{folder.path}, {folder.card.documents:,} documents, "
            f"{tokens_text(folder.card.tokens)} tokens, hash {folder.card.index_sha256[:_HASH]}"
        )
    return [*lines, *_rest(len(facts.streams) - _MAX_STREAMS, "streams")]


def _rest(count: int, noun: str) -> list[str]:
    return [f"          and {count} more {noun}"] if count > 0 else []


def _saves(config: RunConfig) -> str:
    settings = config.checkpoint
    intervals = (
        (settings.interval_seconds, "s"),
        (settings.interval_steps, "steps"),
        (settings.interval_tokens, "tokens (kept)"),
    )
    when = [f"every {interval:,g} {unit}" for interval, unit in intervals if interval is not None]
    if settings.milestones != "none":
        when.append(f"at the steps of {settings.milestones} (kept)")
    return f"{', '.join([*when, 'at the end of each phase (kept)'])}; otherwise the newest {settings.keep} are kept"


def final_summary(
    folder: str,
    *,
    tokens: int,
    steps: int,
    loss: float | None,
    held_out: str | None,
    compared: str | None = None,
    spent: str | None = None,
    measured: bool,
) -> str:
    """Return the last lines of a finished run.

    Args:
        folder: of the run.
        tokens, steps: trained.
        loss: see `training_loss`.
        held_out: figures measured at the end; None without held-out data.
        compared: table of changes since before the first step, see eval_delta.py.
        spent: where its time went, see effective.py.
        measured: True if `eval` has data to measure it on.
    """
    figures = [f"done: {tokens:,} tokens in {steps:,} steps"]
    if loss is not None:
        figures.append(f"loss {loss:.3f} (mean of the last {min(steps, LOSS_STEPS)} steps)")
    if held_out is not None:
        figures.append(held_out)
    more = [text for text in (spent, compared) if text is not None]
    return "\n".join([", ".join(figures), *more, next_commands(folder, measured=measured)])


def next_commands(folder: str, *, measured: bool) -> str:
    """Return the next commands for a trained run, ready to paste."""
    verbs = (["eval"] if measured else []) + ["export", "report"]
    return "\n".join(["next:", *(f"  python -m modernbert_train {verb} {shlex.quote(folder)}" for verb in verbs)])
