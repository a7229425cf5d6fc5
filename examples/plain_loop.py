"""A whole pretraining run in one file of plain torch: YAML, data, model, optimizer, clock, the step, a checkpoint.

    python examples/plain_loop.py yamls/quickstart.yaml
    torchrun --standalone --nproc-per-node 2 examples/plain_loop.py yamls/quickstart.yaml distributed.strategy=fsdp2

It uses this project's parts without Composer: the step below is written out. Its losses equal those by `python -m
modernbert_train train` to the bit on one process, and within float error on several; tests/examples compares them. Read
it to learn the parts of a step, or copy it for your own loop. docs/decisions/composer-as-engine.md lists the features
that `train` adds.

Shape legend: none; see modernbert_train/batch.py for the shapes of a batch.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from modernbert_train.batch import weighted
from modernbert_train.clock import Clock
from modernbert_train.config.check import check
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.keyed_random import derive
from modernbert_train.core.torch_internals import FixedBuckets
from modernbert_train.data.check_shards import check_data
from modernbert_train.data.loader import StepBatch
from modernbert_train.data.path import open_path
from modernbert_train.distributed.compute import Compute
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models.build import build_model
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.models.init import initialize
from modernbert_train.objectives import build_objective
from modernbert_train.optim.optimizers import apply_clock, build_optimizer
from modernbert_train.optim.stable_adamw import clip, tensor_norms

DROPOUT = 4  # stream id for dropout keys; other consumers of the seed use other ids


def main(words: list[str]) -> None:
    """Train the run of a command line (YAML files and overrides) to its end; after a kill, continue."""
    files, overrides = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    config = load_run(files, overrides)
    compute = Compute.of(config.compute)  # first: it makes this rank's GPU the current one
    with joined(compute.device):
        train(config, compute)


def train(config: RunConfig, compute: Compute) -> None:
    """Build all parts, restore the newest checkpoint, and take the remaining steps.

    A separate function, so that DDP's wrapper is destroyed before the process group: its destructor waits for the
    group's threads while it holds the GIL, and the process would never end.
    """
    rank, ranks = rank_and_ranks()
    check(config, ranks)
    facts, clock = check_data(config), Clock.of(config)
    objective_of = partial(build_objective, vocabulary=facts.vocabulary)
    loader = open_path(config.data, config.seed, clock, facts, objective_of).loader(rank, ranks)
    texts = HeldOutTexts(config.data, config.eval, clock, config.model.vocab_size, facts)
    validation = texts.validation() if config.data.validation is not None else None
    model, trained = placed_model(config, compute.device, ranks)
    optimizer = build_optimizer(config.optim, model)
    step, phase = restore(config, model, optimizer, loader)
    if rank == 0:
        print(f"{config.name}: {ranks} ranks, {compute.device.type}, from step {step}", flush=True)

    for batch in loader:
        plan = batch.plan
        if plan.phase != phase:
            if phase is not None and clock.phase(plan.phase).phase.reset_moments:
                optimizer.state.clear()
            phase = plan.phase
        set_clock(clock, plan.tokens_before, model, optimizer)
        losses, counts = gradients(config, compute, batch, model, trained, step)
        loss, squared_norm = numbers_of_all_ranks(plan.objective.terms, losses, counts, model)
        if not (math.isfinite(loss) and math.isfinite(squared_norm)):
            raise SystemExit(f"step {step + 1}: loss {loss}, squared gradient norm {squared_norm}")
        if (max_norm := config.optim.max_grad_norm) is not None:
            clip(model.parameters(), math.sqrt(squared_norm), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, before, after = step + 1, plan.tokens_before, plan.tokens_before + plan.tokens
        line = {"step": step, "phase": phase, "tokens": after, "lr": optimizer.param_groups[0]["lr"]}
        record(config, {"kind": "step", **line, "loss": loss, "grad_norm": math.sqrt(squared_norm)})
        if validation is not None and clock.validates(config.eval, validation.tokens, before, after):
            measured = validation.evaluate(model, clock.at(before), compute)
            record(config, {"kind": "validation", **line, **measured.as_dict()})
        every = config.checkpoint.interval_steps
        if clock.ends_phase(before, after) or (every and step % every == 0):
            save(config, model, optimizer, step, {**loader.state_dict(), "phase": phase})


def set_clock(clock: Clock, tokens: int, model: OnEncoder, optimizer: torch.optim.Optimizer) -> None:
    """Set everything that is a function of the clock: learning rates, weight decay, RoPE bases."""
    apply_clock(optimizer, clock, tokens)
    model.set_phase(clock.at(tokens).model)


def gradients(
    config: RunConfig, compute: Compute, batch: StepBatch, model: OnEncoder, trained: nn.Module, step: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Run forward and backward of this rank's microbatches; the loss is a mean over the global batch.

    Args:
        model: as built.
        trained: the module to call: the model, or DDP around it.

    Returns:
        This rank's sum of each loss term, on the device, and its count.
    """
    rank, ranks = rank_and_ranks()
    terms, microbatches = batch.plan.objective.terms, batch.microbatches
    counts = {term: sum(part.counts[term] for part in microbatches) for term in terms}
    divisors = counts_per_rank(counts, compute.device)
    sums: dict[str, list[Tensor]] = {term: [] for term in terms}
    for number, part in enumerate(microbatches):
        key_dropout(config, compute.device, step, number * ranks + rank)
        with accumulating(trained, last=number == len(microbatches) - 1):
            with torch.autocast(compute.device.type, torch.bfloat16, enabled=compute.bf16):
                losses = trained(part.to(compute.device, non_blocking=True))
            weighted(losses.losses, terms, divisors).backward()
        for term in terms:
            sums[term].append(losses.losses[term].detach())
    return {term: torch.stack([each.double() for each in sums[term]]).sum() for term in terms}, counts


def key_dropout(config: RunConfig, device: torch.device, step: int, microbatch: int) -> None:
    """Seed a microbatch's dropout by its position in the run, so that no generator state is saved."""
    key = derive(derive(config.seed, DROPOUT, step), microbatch) >> 1
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)


def counts_per_rank(counts: Mapping[str, int], device: torch.device) -> dict[str, float | Tensor]:
    """Return the divisors of sums: global counts over the number of ranks, since gradients are averaged."""
    if not dist.is_initialized():
        return {term: float(max(1, count)) for term, count in counts.items()}
    totals = torch.tensor([*counts.values()], dtype=torch.float64).to(device)
    dist.all_reduce(totals)
    return dict(zip(counts, (totals.clamp(min=1) / dist.get_world_size()).unbind(), strict=True))


def numbers_of_all_ranks(
    terms: Mapping[str, float], sums: Mapping[str, Tensor], counts: Mapping[str, int], model: nn.Module
) -> tuple[float, float]:
    """Return the global loss and the gradient's squared norm, with one all-reduce and the only host sync."""
    counts_of_terms = torch.tensor([counts[term] for term in terms], dtype=torch.float64).to(
        next(iter(sums.values())).device
    )
    totals = torch.cat([torch.stack([*sums.values()]), counts_of_terms, squared_gradient(model).view(1)])
    if dist.is_initialized():
        dist.all_reduce(totals)
    *numbers, squared_norm = totals.tolist()
    losses = [each / max(1.0, count) for each, count in zip(numbers, numbers[len(terms) :], strict=False)]
    return sum(weight * loss for weight, loss in zip(terms.values(), losses, strict=True)), squared_norm


@torch.no_grad()
def squared_gradient(model: nn.Module) -> Tensor:
    """Return this rank's part: of a replicated gradient an equal share; of a sharded one its shards."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if isinstance(grads[0], DTensor):
        return torch.stack(tensor_norms([each.to_local() for each in grads])).square().sum()  # type: ignore[attr-defined]
    return torch.stack(tensor_norms(grads)).square().sum() / rank_and_ranks()[1]


def placed_model(config: RunConfig, device: torch.device, ranks: int) -> tuple[OnEncoder, nn.Module]:
    """Build the model with its initial weights on its device, and the module to call.

    The order matters: layers are compiled before they are sharded, a sharded model is allocated only afterwards, and
    each weight is drawn by its name, the same for any sharding.
    """
    sharded = config.distributed.strategy != "ddp" and ranks > 1
    with torch.device("meta") if sharded else nullcontext():
        model = build_model(config.model, config.objective, config.compute)
    if config.compute.compile:
        model.compile_layers()
    if sharded:
        mesh = init_device_mesh(device.type, (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    initialize(model, config.model, config.seed)
    model.train()
    if sharded or ranks == 1:
        return model, model
    ddp = partial(FixedBuckets, gradient_as_bucket_view=True, init_sync=False)
    return model, ddp(model, find_unused_parameters=model.idles)


@contextmanager
def accumulating(trained: nn.Module, *, last: bool) -> Iterator[None]:
    """Sum gradients over ranks only in the last microbatch of a step."""
    if isinstance(trained, FSDPModule):
        trained.set_is_last_backward(last)
        trained.set_requires_gradient_sync(last)
    with trained.no_sync() if isinstance(trained, DistributedDataParallel) and not last else nullcontext():
        yield


def save(config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, cursor: Any) -> None:
    """Write a checkpoint in torch's format. It counts once `latest` names it."""
    folder = folder_of(config) / f"step-{step}"
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    if rank_and_ranks()[0] == 0:
        aside = folder_of(config) / "latest.part"
        aside.write_text(json.dumps({"step": step, "place": cursor}), encoding="utf-8")
        aside.replace(folder_of(config) / "latest")


def restore(
    config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[int, str | None]:
    """Restore the newest checkpoint; return the number of steps before it and the phase of its last step."""
    latest = folder_of(config) / "latest"
    if not latest.exists():
        return 0, None
    state = json.loads(latest.read_text(encoding="utf-8"))
    weights, moments = get_state_dict(model, optimizer)  # tensors of the right shapes to load into
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder_of(config) / f"step-{state['step']}")
    options = StateDictOptions(strict=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    loader.load_state_dict(state["place"])
    return state["step"], state["place"]["phase"]


def record(config: RunConfig, line: dict[str, Any]) -> None:
    """Append a line to metrics.jsonl on rank 0."""
    if rank_and_ranks()[0] == 0:
        with (folder_of(config) / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def folder_of(config: RunConfig) -> Path:
    """Return the folder of this loop's files, separate from `train`'s, which uses another format."""
    folder = Path(config.runs_folder) / f"{config.name}-plain"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Context of the process group, if torchrun started several processes."""
    first = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if first:
        on_gpu = device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield
    finally:
        if first:
            gc.collect()  # DDP's wrapper is part of a cycle, and must be destroyed before the group; see `train`
            dist.destroy_process_group()


def rank_and_ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


if __name__ == "__main__":
    main(sys.argv[1:])
