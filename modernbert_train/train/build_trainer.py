"""Build the training loop from a configuration, on one page.

shards -> planner -> workers -> loader -+
model -> FSDP2 or DDP ------------------+-> Composer's trainer -> the loop (step.py) -> checkpoints
optimizer ------------------------------+
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from composer import Callback

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.saver import PATIENCE, Saver, ranks_that_see
from modernbert_train.clock import Clock
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.facts import DataFacts
from modernbert_train.data.path import DataPath, open_path
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, this_rank
from modernbert_train.distributed.save_requests import Requests
from modernbert_train.evaluate.heldout import HeldOutTexts
from modernbert_train.models import build as models
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.objectives import build_objective
from modernbert_train.optim.optimizers import build_optimizer
from modernbert_train.plan.expected_loss import rule_of
from modernbert_train.report.eval_delta import measures_before
from modernbert_train.report.progress import Progress, stage
from modernbert_train.report.record import Record
from modernbert_train.report.throughput import Meter
from modernbert_train.train.adapters import ComposerObjective, assert_sharded, is_sharded, parallelism
from modernbert_train.train.callbacks import build_loggers
from modernbert_train.train.checkpointing import Checkpoints
from modernbert_train.train.composer_internals import LoopTrainer, composer_device, composer_precision
from modernbert_train.train.measurements import Measurements
from modernbert_train.train.recorder import Recorder
from modernbert_train.train.silent_faults import SilentFaults
from modernbert_train.train.stability import Guard
from modernbert_train.train.step import Loop


def build(
    config: RunConfig,
    facts: DataFacts,
    compute: Compute,
    folder: RunFolder,
    fingerprint: dict[str, str],
    requests: Requests,
    callbacks: list[Callback],
    *,
    last_phase: str | None,
) -> Loop:
    """Build everything that trains a run. The model's weights are still uninitialised.

    Args:
        config: the run's configuration.
        facts: checked facts of its data.
        compute: device and precision.
        folder: the run's folder, open on rank 0.
        fingerprint: fingerprint of the data, stored in checkpoints.
        requests: requests to save or stop.
        callbacks: Composer's and the user's.
        last_phase: phase of the step before the first; None if the clock begins at 0.
    """
    rank, ranks, clock = this_rank(), num_ranks(), Clock.of(config)
    sharded = is_sharded(config.distributed, ranks)
    stage("reading the lengths of the documents")
    data = build_data(config, facts)
    loader = data.loader(rank, ranks)
    stage("building the model")
    adapter = ComposerObjective(build_model(config, sharded=sharded))
    progress = Progress(config.logging, clock.total_tokens, visible=rank == 0)
    record = Record(folder if rank == 0 else None, progress)
    trainer = LoopTrainer(
        model=adapter,
        optimizers=build_optimizer(config.optim, adapter.model),
        train_dataloader=loader,
        max_duration=f"{clock.total_tokens}tok",
        device_train_microbatch_size=1,  # no effect: the loader cuts the microbatches itself
        device=composer_device(compute.device),
        precision=composer_precision(compute.device, compute.precision),
        parallelism_config=parallelism(config.distributed, ranks),
        dist_timeout=config.distributed.timeout_seconds,
        seed=config.seed,
        run_name=config.name,
        callbacks=callbacks,
        loggers=build_loggers(config.loggers, folder.path),
        progress_bar=False,
        python_log_level="error",
    )
    if sharded:
        assert_sharded(trainer.state.model, config.distributed.shard_ranks)
    log = trainer.logger.log_metrics
    writers = ranks_that_see(folder.path) if ranks > 1 else [0]
    if len(writers) < ranks and rank == 0:
        progress.line(f"{len(writers)} of {ranks} ranks see {folder.path}; they write the checkpoints")
    saver = Saver(folder.checkpoints, config.checkpoint.keep, writers, PATIENCE, requests.save_failed)
    guard = Guard(config.stability, clock, config.seed, compute, adapter, data.streams, folder, progress, saver.wait)
    meter = Meter(config.model, clock.total_tokens, compute)
    texts = HeldOutTexts(config.data, config.eval, clock, config.model.vocab_size, facts)
    profile = None
    if config.profile is not None and rank == 0:
        from modernbert_train.train.profiling import Profile

        profile = Profile(config.profile, folder.path / "profile", compute.device, progress)
    loop = Loop(
        clock=clock,
        seed=config.seed,
        distributed=config.distributed,
        compute=compute,
        trainer=trainer,
        loader=loader,
        requests=requests,
        guard=guard,
        recorder=Recorder(meter, clock.total_tokens, config.distributed.timeout_seconds, record, progress, log),
        measurements=Measurements(
            texts,
            config.evals,
            clock,
            compute,
            record,
            progress,
            folder.read_metrics,
            log,
            rule=rule_of(clock, config.optim.name, from_scratch=config.from_scratch),
            at_first=measures_before(config.weights, config.objective),
        ),
        checkpoints=Checkpoints(
            config.checkpoint,
            clock,
            to_yaml(config),
            loader,
            folder,
            fingerprint,
            guard.memory,
            record,
            progress,
            requests,
            saver,
            writers,
            log,
        ),
        silent=SilentFaults(compute.device) if ranks > 1 and not sharded else None,
        profile=profile,
        phase=last_phase,
    )
    trainer.loop = loop.run
    return loop


def build_model(config: RunConfig, *, sharded: bool) -> OnEncoder:
    """Build the model without its weights; `session` fills them in once it is on its device.

    Args:
        config: the run's configuration.
        sharded: build on the meta device; FSDP2 then allocates each rank's shards.
    """
    with torch.device("meta") if sharded else nullcontext():
        model = models.build_model(config.model, config.objective, config.compute)
    if config.compute.compile:
        model.compile_layers()
    return model


def build_data(config: RunConfig, facts: DataFacts) -> DataPath:
    """Return the path from the training text to batches."""
    objective_of = partial(build_objective, vocabulary=facts.vocabulary)
    is_branch = config.start is not None
    return open_path(config.data, config.seed, Clock.of(config), facts, objective_of, is_branch=is_branch)
