"""A configuration becomes a Trainer, on one page. Read this first.

shards -> planner -> workers -> loader -+
model -> FSDP2 or DDP ------------------+-> composer.Trainer -> checkpoints
optimizer <- clock <- callbacks --------+
"""

from __future__ import annotations

import atexit
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial

import torch
from composer import Callback
from composer.utils import dist

from modernbert_train.config.check import check
from modernbert_train.config.load import flat
from modernbert_train.config.schema import DataConfig, RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.dataset_card import TOKEN_COUNTS, read_card
from modernbert_train.data.fingerprint import data_fingerprint
from modernbert_train.data.folders import open_shards
from modernbert_train.data.loader import MicrobatchMaker, PackedLoader
from modernbert_train.data.mixture import Stream, TokenStreams, open_streams
from modernbert_train.data.planner import BatchPlanner
from modernbert_train.data.remote import local_folder
from modernbert_train.data.shares import token_shares
from modernbert_train.errors import StoppedEarly
from modernbert_train.models.init import initialize
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.optim.build import build_optimizer
from modernbert_train.train.accumulation import accumulation
from modernbert_train.train.adapters import ComposerMaskedLM, assert_sharded, data_spec, is_sharded, parallelism
from modernbert_train.train.agreement import require_agreement
from modernbert_train.train.banner import banner
from modernbert_train.train.callbacks import Measure, PlanAhead, SafeReport, SetClock, Trace, Validate, key_dropout
from modernbert_train.train.closing import closing_text, next_commands
from modernbert_train.train.device import choose_device, keep_freed_memory, resolve_precision
from modernbert_train.train.engine_plugins import build_callbacks, build_loggers, check_loggers
from modernbert_train.train.evaluate import MASK_SEED, TokenCounts, Unigram, Validation
from modernbert_train.train.failures import tell_others
from modernbert_train.train.meter import Meter
from modernbert_train.train.origin import Origin, find_origin
from modernbert_train.train.preflight import preflight
from modernbert_train.train.profile import Profile
from modernbert_train.train.progress import Progress
from modernbert_train.train.ranks import composer_device, joined, on_rank_zero
from modernbert_train.train.requests import Requests
from modernbert_train.train.run_folder import RunFolder
from modernbert_train.train.saving import Save
from modernbert_train.train.stability import Guard
from modernbert_train.train.stages import stage
from modernbert_train.train.start import (
    Start,
    any_checkpoint,
    check_same_data,
    find_branch,
    find_start,
    origin_text,
    restore,
)
from modernbert_train.train.trainer import PlannedTrainer
from modernbert_train.train.transport import warn_of_slow_network
from modernbert_train.vocabulary import Vocabulary, read_vocabulary


def train(config: RunConfig, *, fresh: bool = False) -> None:
    """Train a run to its end, from wherever it stands.

    Args:
        config: the run; its rules are checked again with the true number of ranks.
        fresh: put what the run's folder holds aside and start from scratch.

    Raises:
        RunError: anything that the user has to mend; StoppedEarly when a signal ended the run after a checkpoint.
    """
    device = choose_device(config)
    if device.type == "cpu":
        keep_freed_memory()
    requests = Requests(config.checkpoint.interval_seconds)
    with closing(requests), joined(device, config.distributed.timeout_seconds):
        check(config, dist.get_world_size())
        if dist.get_world_size() > 1:
            require_agreement(config, data_fingerprint(config, read_vocabulary(config.data.tokenizer)))
            on_rank_zero(lambda: preflight(config, dist.get_world_size(), fresh=fresh))
        if device.type == "cuda" and dist.get_world_size() > dist.get_local_world_size() and dist.get_local_rank() == 0:
            warn_of_slow_network()  # of each machine, since they may differ
        plugins = build_callbacks(config, device)
        check_loggers(config)
        folder = RunFolder(config)
        # before the folder is made, so that a mistake in it can be mended under the same name
        first = on_rank_zero(lambda: fresh or not any_checkpoint(folder))
        origin = on_rank_zero(lambda: find_origin(config) if first else None)
        branch = on_rank_zero(lambda: find_branch(config) if first else None)
        changed = on_rank_zero(lambda: folder.open(fresh=fresh))
        if dist.get_global_rank() == 0 and changed:
            print("changed since the last start:", *changed, sep="\n  ")
        try:
            _train(config, folder, device, origin, branch, plugins, requests)
        finally:
            folder.close()


def _train(
    config: RunConfig,
    folder: RunFolder,
    device: torch.device,
    origin: Origin | None,
    branch: Start | None,
    plugins: list[Callback],
    requests: Requests,
) -> None:
    rank, num_ranks = dist.get_global_rank(), dist.get_world_size()
    start = branch or on_rank_zero(lambda: find_start(folder))
    if start.tokens >= config.total_tokens:
        on_rank_zero(folder.save_config)
        if rank == 0:
            print(f"{config.name}: already trained to its end, {start.tokens:,} tokens. Nothing to do.")
            print(next_commands(config))
        return
    vocabulary = read_vocabulary(config.data.tokenizer)
    fingerprint = check_same_data(start, config, data_fingerprint(config, vocabulary))
    on_rank_zero(folder.save_config)
    stage("reading the lengths of the documents")
    loader = build_loader(config, vocabulary, rank, num_ranks)
    stage("building the model")
    model = build_model(config, sharded=is_sharded(config, num_ranks))
    progress = Progress(config, visible=rank == 0)
    recorder = folder if rank == 0 else None
    adapter = ComposerMaskedLM(model)
    guard = Guard(config, loader, folder, progress, partial(key_dropout, config, adapter), requests)
    precision = resolve_precision(config, device)
    measure = Measure(recorder, progress, guard, loader, Meter(config, device, precision))
    save = Save(config, loader, folder, fingerprint, guard, measure, requests)
    callbacks = [Trace(), SetClock(config, start.phase), measure, PlanAhead(loader), guard]
    bf16 = precision == "amp_bf16"
    validate = None
    if config.data.validation is not None:
        validate = Validate(config, build_validation(config, vocabulary), recorder, progress, measure, bf16)
        callbacks.append(validate)
    callbacks += [*plugins, *accumulation(config, num_ranks), save]
    if rank == 0:
        callbacks.append(SafeReport(folder.path))
        lines = banner(
            config,
            origin=origin_text(start, origin),
            fingerprint=fingerprint,
            device=device,
            precision=precision,
            ranks=num_ranks,
            ranks_per_node=dist.get_local_world_size(),
        )
        print(lines, flush=True)
        if config.profile is not None:
            callbacks.append(Profile(config.profile, folder.path / "profile", device, progress))
    trainer = PlannedTrainer(
        model=adapter,
        optimizers=build_optimizer(config, model),
        train_dataloader=data_spec(loader, device),
        max_duration=f"{config.total_tokens}tok",
        spin_dataloaders=False,  # our loader starts where it is told; Composer would read everything before it again
        accumulate_train_batch_on_tokens=True,
        device_train_microbatch_size=1,  # of no effect: the loader cuts microbatches itself
        device=composer_device(device),
        precision=precision,
        parallelism_config=parallelism(config, num_ranks),
        dist_timeout=config.distributed.timeout_seconds,
        seed=config.seed,
        run_name=config.name,
        callbacks=callbacks,
        loggers=build_loggers(config),
        progress_bar=False,
        python_log_level="error",
    )
    if is_sharded(config, num_ranks):
        assert_sharded(trainer.state.model, config.distributed.shard_ranks)
    # only now, when a sharded model has its memory: no rank ever holds it whole
    if start.checkpoint is not None:
        stage(f"restoring {start.checkpoint.folder.name}")
        restore(trainer, loader, start)
        if start.branch is None:
            assert start.checkpoint.state.training is not None
            guard.load_state_dict(start.checkpoint.state.training.stability)
    elif origin is not None:
        stage(f"reading the first weights from {origin.source.folder}")
        origin.fill(model)
    else:
        initialize(model, config.model, config.seed)
    on_rank_zero(lambda: _record_start(folder, start, origin))
    trainer.logger.log_hyperparameters(flat(config))
    requests.listen()
    stage("compiling the layers, and training the first batch" if config.model.compile else "training the first batch")
    try:
        trainer.fit()
    except Exception as error:
        tell_others(error)  # before the loggers are closed, which can take its time
        raise
    finally:
        requests.trained = True
        trainer.engine.close()  # not trainer.close(), which would wait for ranks that have failed
        atexit.unregister(trainer.engine._close)  # else all is closed once more, and kept in memory until then
    dist.barrier()
    if save.stopped:
        raise StoppedEarly(
            f"{folder.path}: stopped at {trainer.state.timestamp.token.value:,} of {config.total_tokens:,} tokens, "
            "checkpoint written. The same command goes on from here."
        )
    if rank == 0:
        at, held_out = trainer.state.timestamp, None if validate is None else validate.last
        print(closing_text(config, tokens=at.token.value, steps=at.batch.value, loss=progress.loss, held_out=held_out))


def build_model(config: RunConfig, *, sharded: bool) -> ModernBertForMaskedLM:
    """The model without its weights: they come when it stands where it will be trained.

    Args:
        config: the run.
        sharded: build it without memory, on the meta device; FSDP2 gives each rank memory for its share.
    """
    with torch.device("meta") if sharded else nullcontext():
        model = ModernBertForMaskedLM(config.model)
    if config.model.compile:
        model.compile_layers()
    return model


def build_loader(config: RunConfig, vocabulary: Vocabulary, rank: int, num_ranks: int) -> PackedLoader:
    """One rank's training batches."""
    check_data(config)
    data: DataConfig = config.data
    streams = open_streams(config, vocabulary)
    return PackedLoader(
        BatchPlanner(config, streams.shuffled(data)),
        MicrobatchMaker(streams, MaskedLM(config.objective, vocabulary), vocabulary),
        rank=rank,
        num_ranks=num_ranks,
        num_workers=data.num_workers,
        prefetch_batches=data.prefetch_batches,
        worker_timeout_seconds=data.worker_timeout_seconds,
    )


def build_validation(config: RunConfig, vocabulary: Vocabulary) -> Validation:
    """The held-out text, with the unigram baseline of the training text."""
    assert config.data.validation is not None
    shards = open_shards(config.data.validation, config.data, vocabulary)
    objective = replace(config.objective, masking="exact")  # whatever training does: figures of all runs compare
    return Validation(
        config,
        MicrobatchMaker(
            TokenStreams([Stream("validation", MASK_SEED, shards)]), MaskedLM(objective, vocabulary), vocabulary
        ),
        shards.lengths,
        build_unigram(config),
    )


def build_unigram(config: RunConfig) -> Unigram:
    """The baseline of the training text; streams count by their shares of the whole run, whatever the phase."""
    folders = {name: local_folder(stream.path, config.data) for name, stream in config.data.all_streams.items()}
    cards = {name: read_card(folder) for name, folder in folders.items()}
    tokens = {name: card.tokens for name, card in cards.items()}
    shares = token_shares(config, tokens, {name: card.documents for name, card in cards.items()})
    total = sum(tokens.values())
    counts = [
        TokenCounts(folder / TOKEN_COUNTS, tokens[name], shares[name] * total / tokens[name])
        for name, folder in folders.items()
    ]
    return Unigram.from_counts(counts, config.model.vocab_size)


def _record_start(folder: RunFolder, start: Start, origin: Origin | None) -> None:
    for text in start.passed_over:
        print(f"warning: passed over a damaged checkpoint: {text}")
    step = start.step
    if start.checkpoint is None or start.branch is not None:
        folder.rewind_metrics(-1)
        folder.record({"kind": "start", "step": step, "tokens": start.tokens, "from": origin_text(start, origin)})
        return
    folder.rewind_metrics(step)
    folder.record({"kind": "resume", "step": step, "tokens": start.tokens, "checkpoint": start.checkpoint.folder.name})
