"""What a run says when it starts: what it will train, on what, from where and to where, in at most 40 lines.

Steps and FLOPs are those of `plan`, which walks the lengths of the documents: about a second for a run so small that
every batch is planned, less for others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import torch

from modernbert_train.config.describe import advice
from modernbert_train.config.schema import DataConfig, ModelConfig, RunConfig
from modernbert_train.data.check import few_predictions
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.remote import local_folder
from modernbert_train.models.attention import choose_kernel
from modernbert_train.plan.make import Plan, make_plan
from modernbert_train.ranks.transport import find_transport
from modernbert_train.text import plural, rate, table, tokens_text

_MOST_PHASES, _MOST_STREAMS = 10, 12  # lines for each
_HASH = 12  # characters of it, as in the messages that compare two


def banner(
    config: RunConfig,
    *,
    origin: str,
    fingerprint: Mapping[str, str],
    device: torch.device,
    precision: str,
    ranks: int,
    ranks_per_node: int,
) -> str:
    """The lines, without a newline at the end.

    Args:
        config: the run, checked, with its data.
        origin: where it starts.
        fingerprint: hashes of the data and the tokenizer.
        device: of this rank.
        precision: as Composer names it.
        ranks, ranks_per_node: of the run.
    """
    plan = make_plan(replace(config, data=_local(config.data)), ranks)
    about = "" if plan.exact else "about "
    parameters, model = plan.parameters, config.model
    flops = sum(phase.tokens * phase.flops.training for phase in plan.phases)
    whole = sum(model.is_global(index) for index in range(model.num_layers))
    lines = [
        f"{config.name}: {parameters.total:,} parameters, {config.total_tokens:,} tokens, {about}{plan.steps:,} steps, "
        f"{rate(flops)} FLOPs",
        f"  model   {model.num_layers} layers ({whole} global) of width {model.hidden_size}; "
        f"{parameters.embedding:,} of the parameters are embeddings",
        *_phases(plan),
        f"  on      {_machines(config, device, ranks, ranks_per_node)}, "
        f"{'bf16 autocast over fp32 weights' if precision == 'amp_bf16' else precision}",
        *_network(device, ranks, ranks_per_node),
        f"  kernels {_kernels(model, device, precision)}",
        *_streams(config, fingerprint),
        f"  vocab   {config.data.tokenizer}, hash {fingerprint['tokenizer'][:_HASH]}",
        f"  eval    {_validations(config, plan)}",
        f"  from    {origin}",
        f"  folder  {config.folder}",
        f"  saves   {_saves(config)}",
        *(f"  advice  {text}" for text in advice(config)),
        *(f"  warning {text}" for text in [few_predictions(config)] if text is not None),
    ]
    return "\n".join(lines)


def _local(data: DataConfig) -> DataConfig:
    """The same data with the small files of remote folders read from their copies here."""
    if data.validation is not None:
        data = replace(data, validation=str(local_folder(data.validation, data)))
    if data.train is not None:
        return replace(data, train=str(local_folder(data.train, data)))
    streams = {name: replace(s, path=str(local_folder(s.path, data))) for name, s in data.streams.items()}
    return replace(data, streams=streams)


def _phases(plan: Plan) -> list[str]:
    rows = [("  phase", "tokens", "row", "batch rows", "microbatch", "steps", "FLOPs/token")]
    for phase in plan.phases[:_MOST_PHASES]:
        first = min(part.rows for part in phase.ranges) if phase.ranges else phase.config.batch_rows
        last = phase.config.batch_rows
        rows.append(
            (
                f"  {phase.name}",
                f"{phase.config.tokens:,}",
                f"{phase.config.row_tokens:,}",
                f"{last:,}" if first == last else f"{first:,} to {last:,}",
                f"{phase.config.microbatch_tokens:,}",
                f"{phase.steps:,}",
                f"{rate(phase.flops.training)}",
            )
        )
    lines = table(rows, numbers=True).split("\n")
    return [*lines, *_rest(len(plan.phases) - _MOST_PHASES, "phases")]


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


def _kernels(model: ModelConfig, device: torch.device, precision: str) -> str:
    """The kernels that the model chooses for this device and precision, asked in the way in which it asks."""
    dtype = torch.bfloat16 if precision == "amp_bf16" else torch.float32
    local = choose_kernel(model.attention, device, dtype).name
    whole = local if model.global_attention is None else choose_kernel(model.global_attention, device, dtype).name
    names = local if whole == local else f"{whole} in global layers, {local} in local ones"
    extras = [*(["compiled"] * model.compile), *(["recomputed in the backward pass"] * model.activation_checkpointing)]
    return ", ".join([names, *(extras or ["not compiled"])])


def _streams(config: RunConfig, fingerprint: Mapping[str, str]) -> list[str]:
    lines = []
    for name, stream in list(config.data.all_streams.items())[:_MOST_STREAMS]:
        card = read_card(local_folder(stream.path, config.data))
        key, title = ("shards", "") if config.data.train is not None else (f"shards of {name}", f"{name}: ")
        lines.append(
            f"  data    {title}{stream.path}, {card.documents:,} documents, {tokens_text(card.tokens)} tokens, "
            f"hash {fingerprint[key][:_HASH]}"
        )
    return [*lines, *_rest(len(config.data.all_streams) - _MOST_STREAMS, "streams")]


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
    return f"{', '.join([*when, 'at the end of each phase (kept)'])}; otherwise the newest {settings.keep} are kept"
