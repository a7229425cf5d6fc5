"""A configuration becomes a Trainer, on one page. Read this first.

shards -> planner -> workers -> loader -+
model -> FSDP2 or DDP ------------------+-> composer.Trainer -> checkpoints
optimizer <- clock <- callbacks --------+

One optimizer step, in the order of Composer's events; callbacks act in the order of the list in `build`:

| event               | who acts         | reads -> writes                                                            |
| ------------------- | ---------------- | -------------------------------------------------------------------------- |
| (before all steps)  | Validate, ...    | first weights from elsewhere -> the figures to compare with                |
| before_dataloader   | Measure          | the time, for what is spent waiting                                        |
| (next batch)        | PackedLoader     | the plan -> this rank's microbatches; the position in the data             |
| batch_start         | SetClock         | the clock -> learning rates, decay, RoPE bases, the key of dropout         |
| before_train_batch  | ReduceCopiesOnce | HSDP: how many microbatches are left                                       |
| (forward, backward) | PlannedTrainer   | microbatches -> gradients of the mean over the global batch                |
| after_train_batch   | Measure          | the step before -> its line of metrics.jsonl, where that had to wait       |
|                     | PlanAhead        | nothing -> the next plan, while the device computes                        |
|                     | CurrentStep      | loss, gradients and requests of all ranks -> StepNumbers; the one wait     |
|                     | Guard            | StepNumbers, the losses before -> whether the update is skipped            |
|                     | ClipGradients    | the gradient's norm -> gradients of at most optim.max_grad_norm (adamw)    |
|                     | Save             | a checkpoint's copies under way -> the device waits for them               |
| (optimizer step)    | StableAdamW      | gradients -> moments, weights                                              |
| batch_end           | Measure          | StepNumbers, the norm of the update -> a line of metrics.jsonl             |
|                     | Guard            | its verdict -> a rollback                                                  |
|                     | Validate         | held-out text, where the clock says so -> figures                          |
|                     | Evaluate         | labelled texts, where the clock says so -> figures                         |
|                     | plugins          | Composer's own callbacks, by name                                          |
|                     | Save             | StepNumbers, a copy of all state -> saver.py writes it; stops if asked     |
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from composer import Callback, Trainer

from modernbert_train.compute import Compute
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.loader import PackedLoader
from modernbert_train.data.path import DataPath, open_path
from modernbert_train.models import build as models
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.objectives import build_objective
from modernbert_train.optim.build import build_optimizer
from modernbert_train.ranks.group import num_ranks, this_rank
from modernbert_train.ranks.save_requests import Requests
from modernbert_train.run.progress import Progress, stage
from modernbert_train.run.record import Record
from modernbert_train.run.run_folder import RunFolder
from modernbert_train.run.saver import PATIENCE, Saver, ranks_that_see
from modernbert_train.train.accumulation import accumulation
from modernbert_train.train.adapters import ComposerObjective, assert_sharded, data_spec, is_sharded, parallelism
from modernbert_train.train.callbacks import (
    Evaluate,
    Measure,
    PlanAhead,
    SafeReport,
    SetClock,
    Trace,
    Validate,
    key_dropout,
)
from modernbert_train.train.checkpointing import Save
from modernbert_train.train.clipping import ClipGradients
from modernbert_train.train.composer_internals import PlannedTrainer, composer_device
from modernbert_train.train.plugins import build_loggers
from modernbert_train.train.profiling import Profile
from modernbert_train.train.silent_faults import SilentFaults
from modernbert_train.train.stability import Guard
from modernbert_train.train.step_numbers import CurrentStep


@dataclass(frozen=True)
class Built:
    """A trainer, and those of its parts that its start and its end deal with. The model is without its weights."""

    trainer: Trainer
    model: OnEncoder
    loader: PackedLoader
    guard: Guard
    save: Save
    validate: Validate | None
    progress: Progress


def build(
    config: RunConfig,
    facts: DataFacts,
    compute: Compute,
    folder: RunFolder,
    fingerprint: dict[str, str],
    requests: Requests,
    plugins: list[Callback],
    *,
    last_phase: str | None,
) -> Built:
    """Build everything that trains a run.

    Args:
        config: the run.
        facts: of its data, checked.
        compute: device and precision.
        folder: open, on rank 0.
        fingerprint: of the data, for checkpoints.
        requests: to save and to stop.
        plugins: Composer's own callbacks.
        last_phase: of the step before the first; None where the clock begins at 0.
    """
    rank, ranks = this_rank(), num_ranks()
    stage("reading the lengths of the documents")
    data = build_data(config, facts)
    loader = data.loader(rank, ranks)
    stage("building the model")
    model = build_model(config, sharded=is_sharded(config, ranks))
    progress = Progress(config, visible=rank == 0)
    record = Record(folder if rank == 0 else None, progress)
    adapter = ComposerObjective(model)
    step = CurrentStep(requests, SilentFaults(compute.device) if ranks > 1 and not is_sharded(config, ranks) else None)
    checkpoints, settings = folder.checkpoints, config.checkpoint
    writers = ranks_that_see(folder.path) if ranks > 1 else [0]
    if len(writers) < ranks and rank == 0:
        progress.line(f"{len(writers)} of {ranks} ranks see {folder.path}; they write the checkpoints")
    saver = Saver(checkpoints, settings.keep, writers, PATIENCE, requests.save_failed)
    reseed = partial(key_dropout, config, adapter)
    guard = Guard(config, data.streams, folder, progress, reseed, step, saver.wait)
    measure = Measure(config, compute, step, record, progress)
    save = Save(*(config, loader, folder, fingerprint, guard.memory, record, progress, step, requests, saver, writers))
    held_out = config.data.validation is not None
    validate = Validate(config, facts, compute, record, progress, step, folder.read_metrics) if held_out else None
    max_norm: float | None = getattr(config.optim, "max_grad_norm", None)
    callbacks = [
        *(Trace(config.distributed), SetClock(config, last_phase), measure, PlanAhead(loader), step, guard),
        *([] if max_norm is None else [ClipGradients(max_norm, step)]),
        *([] if validate is None else [validate]),
        *([Evaluate(config, compute, record, progress, step, folder.read_metrics)] if config.evals else []),
        *plugins,
        *accumulation(config, ranks),
        save,
        *([SafeReport(folder.path)] if rank == 0 else []),
    ]
    if rank == 0 and config.profile is not None:
        callbacks.append(Profile(config.profile, folder.path / "profile", compute.device, progress))
    trainer = PlannedTrainer(
        model=adapter,
        optimizers=build_optimizer(config, model),
        train_dataloader=data_spec(loader, compute.device),
        max_duration=f"{config.total_tokens}tok",
        spin_dataloaders=False,  # our loader starts where it is told; Composer would read everything before it again
        accumulate_train_batch_on_tokens=True,
        device_train_microbatch_size=1,  # of no effect: the loader cuts microbatches itself
        device=composer_device(compute.device),
        precision=compute.precision,
        parallelism_config=parallelism(config, ranks),
        dist_timeout=config.distributed.timeout_seconds,
        seed=config.seed,
        run_name=config.name,
        callbacks=callbacks,
        loggers=build_loggers(config),
        progress_bar=False,
        python_log_level="error",
    )
    if is_sharded(config, ranks):
        assert_sharded(trainer.state.model, config.distributed.shard_ranks)
    return Built(trainer, model, loader, guard, save, validate, progress)


def build_model(config: RunConfig, *, sharded: bool) -> OnEncoder:
    """The model without its weights: they come when it stands where it will be trained.

    Args:
        config: the run.
        sharded: build it without memory, on the meta device; FSDP2 gives each rank memory for its share.
    """
    with torch.device("meta") if sharded else nullcontext():
        model = models.build_model(config.model, config.objective, config.compute)
    if config.compute.compile:
        model.compile_layers()
    return model


def build_data(config: RunConfig, facts: DataFacts) -> DataPath:
    """The way from the training text to batches."""
    return open_path(config, facts, partial(build_objective, vocabulary=facts.vocabulary))
