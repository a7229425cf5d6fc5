"""One start of a run, from its configuration to its last line: the work of `python -m modernbert_train train`.

The ranks join, rank 0 resolves the run for all (plan/resolve.py), the folder is opened, the start is found (start.py),
the loop is built (build_trainer.py), and it runs (step.py).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from composer import Callback

from modernbert_train.checkpoints.run_folder import TOKENIZER_COPY, RunFolder
from modernbert_train.clock import Clock, Position
from modernbert_train.config.load import flat
from modernbert_train.config.schema import CheckpointConfig, DataConfig, PhaseConfig, RunConfig
from modernbert_train.core.files import errors_to, warn
from modernbert_train.data.dataset_card import file_sha256, file_xxh3
from modernbert_train.data.facts import DataFacts, read_facts
from modernbert_train.data.fingerprint import data_fingerprint
from modernbert_train.data.shard_index import ShardIndex, read_index
from modernbert_train.data.statistics import run_statistics
from modernbert_train.distributed.agreement import require_agreement
from modernbert_train.distributed.compute import Compute, keep_freed_memory, release_freed_memory, use_threads
from modernbert_train.distributed.fail_together import is_own, show, tell_others
from modernbert_train.distributed.group import (
    joined,
    local_rank,
    num_ranks,
    on_rank_zero,
    on_rank_zero_slowly,
    ranks_per_node,
    this_rank,
)
from modernbert_train.distributed.read_per_node import read_once_per_node
from modernbert_train.distributed.save_requests import Requests
from modernbert_train.distributed.transport import warn_of_slow_network
from modernbert_train.errors import DataError, OomBackoff, StoppedEarly, StorageError
from modernbert_train.plan.oom_backoff import halve, is_full
from modernbert_train.plan.resolve import Resolved, close_for_gpus, handed_over, resolve
from modernbert_train.plan.speed_settings import gpus_of_run
from modernbert_train.report.banner import banner, final_summary, next_commands
from modernbert_train.report.effective import spent
from modernbert_train.report.eval_delta import eval_delta
from modernbert_train.report.progress import stage
from modernbert_train.report.training_loss import losses_of, training_loss
from modernbert_train.train import composer_internals
from modernbert_train.train.build_trainer import build
from modernbert_train.train.callbacks import build_callbacks, check_loggers, own_callbacks
from modernbert_train.train.start import Start, fill, find_first, find_start, record_start
from modernbert_train.train.step import Loop
from modernbert_train.vocabulary import copy_tokenizer

if TYPE_CHECKING:
    from modernbert_train.checkpoints.replica import Replica


def train(
    config: RunConfig,
    *,
    fresh: bool = False,
    callbacks: Sequence[Callback | type[Callback]] = (),
    resolved: Resolved | None = None,
) -> None:
    """Train a run to its end, from its newest checkpoint if it has one.

    Args:
        config: the run.
        fresh: move the contents of the run's folder aside and start from scratch.
        callbacks: the calling program's, in addition to the run's.
        resolved: the run as resolved by a caller with a single rank; None: rank 0 resolves it for all.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint;
            OomBackoff if several ranks must be started again.
    """
    while True:
        try:
            _start(config, callbacks, resolved, fresh=fresh)
            return
        except OomBackoff as backoff:
            if num_ranks() > 1:
                raise
            print(backoff, file=sys.stderr, flush=True)
        fresh = False  # the halved microbatch is noted in the folder, which must not be moved aside
        gc.collect()  # frees the trainer that ran out of memory; its parts reference each other
        torch.cuda.empty_cache()


def _start(
    given_config: RunConfig, callbacks: Sequence[Callback | type[Callback]], resolved: Resolved | None, *, fresh: bool
) -> None:
    composer_internals.install()
    compute, requests = Compute.of(given_config.compute), Requests(given_config.checkpoint.interval_seconds)
    with (
        closing(requests),
        _copies(given_config.checkpoint, Path(given_config.folder)) as copies,
        joined(compute.device, given_config.distributed.timeout_seconds),
    ):
        _agree(given_config, compute)
        guests = build_callbacks(given_config.callbacks, Path(given_config.folder), compute.device)
        guests += own_callbacks(callbacks)
        check_loggers(given_config.loggers)
        run = _resolve(given_config, resolved, compute, copies, fresh=fresh)
        config, facts = run.config, read_facts(run.config.data)
        folder = RunFolder(config)
        # before the folder is made, so that a mistake in it can be fixed under the same name
        first = on_rank_zero_slowly(lambda: find_first(config, facts, folder, fresh=fresh))
        with _opened(folder, fresh=fresh):
            start = on_rank_zero_slowly(lambda: find_start(config, facts, folder, first))
            if copies is not None and this_rank() == 0:
                copies.start()
            if start.tokens >= config.total_tokens:
                _say_trained(config, folder, start)
                return
            loop = _build(run, facts, folder, compute, start, guests, requests)
            _run(loop, given_config, config, folder, requests)


def _agree(config: RunConfig, compute: Compute) -> None:
    """Check that all ranks have the same run, code and data.

    Raises:
        ConfigError, DataError: the ranks differ, or the data cannot be read.
    """
    if num_ranks() == 1:
        return
    read = partial(_read_facts, config.data)
    facts = read_once_per_node(read, file_sha256, file_xxh3, ShardIndex)
    require_agreement(flat(config), config.plugins, data_fingerprint(facts))
    if compute.device.type == "cuda" and num_ranks() > ranks_per_node() and local_rank() == 0:
        warn_of_slow_network()  # on every machine, since they may differ


def _resolve(
    given_config: RunConfig, resolved: Resolved | None, compute: Compute, copies: Replica | None, *, fresh: bool
) -> Resolved:
    """Resolve the run on rank 0, for the smallest GPU of all ranks; return the same on every rank.

    Raises:
        RunError: see `resolve` and `close_for_gpus`; or the newest copy of its checkpoints cannot be fetched.
    """
    gpus, ranks = gpus_of_run(compute), num_ranks()

    def decide() -> str:
        run = resolved or handed_over(given_config, ranks) or resolve(given_config, ranks, fresh=fresh, gpu=gpus)
        if copies is not None:
            copies.bring_back(fresh=fresh)
        return close_for_gpus(run, gpus, fresh=fresh).to_json()

    run = Resolved.from_json(on_rank_zero_slowly(decide), given_config)
    use_threads(run.config.compute, compute.device)
    return run


def _copies(settings: CheckpointConfig, folder: Path) -> AbstractContextManager[Replica | None]:
    """Return the copier of the run's checkpoints; None where checkpoint.copy_to is not set."""
    if settings.copy_to is None:
        return nullcontext()
    from modernbert_train.checkpoints.replica import Replica

    return Replica(settings, folder, partial(print, flush=True))


@contextmanager
def _opened(folder: RunFolder, *, fresh: bool) -> Iterator[None]:
    """Hold the run's folder open on rank 0."""
    changed = on_rank_zero(lambda: folder.open(fresh=fresh))
    if this_rank() == 0 and changed:
        print("changed since the last start:", *changed, sep="\n  ")
    try:
        yield
    finally:
        folder.close()


def _say_trained(config: RunConfig, folder: RunFolder, start: Start) -> None:
    on_rank_zero(folder.save_config)
    if this_rank() == 0:
        print(f"{config.name}: already trained to its end, {start.tokens:,} tokens. Nothing to do.")
        if (compared := eval_delta(Clock.of(config), config.eval, folder.read_metrics())) is not None:
            print(compared)
        print(next_commands(config.folder, measured=config.is_measured))


def _build(
    run: Resolved,
    facts: DataFacts,
    folder: RunFolder,
    compute: Compute,
    start: Start,
    guests: list[Callback],
    requests: Requests,
) -> Loop:
    """Build the loop, fill in the weights and the state of the start, and record it."""
    config = run.config
    on_rank_zero(lambda: folder.save_resolved(run.to_json(), asdict(run_statistics(facts))))
    on_rank_zero(lambda: copy_tokenizer(config.data.tokenizer, folder.path / TOKENIZER_COPY))
    loop = build(config, facts, compute, folder, dict(start.data), requests, guests, last_phase=start.phase)
    if this_rank() == 0:
        lines = banner(
            config,
            origin=str(start),
            teacher=None if start.teacher is None else start.teacher.describe(),
            vocabulary=start.effect_lines,
            facts=facts,
            compute=compute,
            speed=run.lines,
            ranks=num_ranks(),
            ranks_per_node=ranks_per_node(),
        )
        print(lines, flush=True)
    fill(loop, start, config)
    loop.checkpoints.restarted = on_rank_zero(lambda: record_start(folder, start, compute.device))
    loop.trainer.logger.log_hyperparameters(flat(config))
    return loop


def _run(loop: Loop, given_config: RunConfig, config: RunConfig, folder: RunFolder, requests: Requests) -> None:
    """Train to the end, then close everything, even after an error.

    Raises:
        RunError: see `train`.
    """
    device = loop.compute.device
    requests.listen()
    stage(
        "compiling the layers, and training the first batch" if config.compute.compile else "training the first batch"
    )
    release_freed_memory()
    if device.type == "cpu":
        keep_freed_memory()
    try:
        with _halving(given_config.phases, loop, folder):
            loop.trainer.fit()
        loop.checkpoints.finish()
    except Exception as raised:  # recorded, then raised again
        error = raised
        if isinstance(raised, RuntimeError) and is_full(raised):
            step = loop.state.timestamp.batch.value + 1
            from modernbert_train.train.out_of_memory import out_of_memory

            error = out_of_memory(raised, _position(loop), config.compute, config.distributed, step, device)
        if is_own(error):  # otherwise the pending checkpoint may be waiting for a lost rank
            if num_ranks() > 1:
                show(error)
            loop.checkpoints.settle(config.distributed.timeout_seconds)
        tell_others(error)  # before closing the loggers, which may take long
        if this_rank() == 0:
            with suppress(StorageError):  # report the error that ended the run instead
                folder.record_start({"kind": "end", "outcome": "failed", "error": _first_line(error)})
        if error is not raised:
            raise error from raised
        raise
    finally:
        if num_ranks() == 1:
            loop.checkpoints.settle(config.distributed.timeout_seconds)
        requests.trained = True
        loop.close()
        if this_rank() == 0:
            _redraw(folder)
        composer_internals.close(loop.trainer)
    outcome = "stopped" if loop.stopped else "finished"
    on_rank_zero(lambda: folder.record_start({"kind": "end", "outcome": outcome}))
    at = loop.state.timestamp
    if loop.stopped:
        raise StoppedEarly(
            f"{folder.path}: stopped at {at.token.value:,} of {loop.clock.total_tokens:,} tokens, "
            "checkpoint written. The same command resumes from here."
        )
    if this_rank() == 0:
        held_out, metrics = loop.measurements.held_out, folder.read_metrics()
        text = final_summary(
            config.folder,
            tokens=at.token.value,
            steps=at.batch.value,
            loss=training_loss(losses_of(metrics)),
            held_out=None if held_out is None else str(held_out),
            compared=eval_delta(loop.clock, config.eval, metrics),
            spent=str(spent(folder.path)),
            measured=config.is_measured,
        )
        print(text)


def _position(loop: Loop) -> Position:
    """Return the position of the current step."""
    plan = getattr(loop.state.batch, "plan", None)  # a microbatch has none; the clock has not counted its step yet
    return loop.clock.at(loop.state.timestamp.token.value) if plan is None else loop.clock.phase(plan.phase)


@contextmanager
def _halving(configured: Mapping[str, PhaseConfig], loop: Loop, folder: RunFolder) -> Iterator[None]:
    """Train inside this context: an automatic microbatch that does not fit on a GPU is halved (oom_backoff.py)."""
    try:
        yield
    except RuntimeError as error:
        if loop.compute.device.type == "cpu" or not is_full(error):
            raise
        now = _position(loop)
        if (instead := halve(folder.path, now.name, configured[now.name], now.phase)) is None:
            raise
        raise instead from error


def _read_facts(data: DataConfig) -> DataFacts:
    """Read the facts of a run's data, and the index of each folder, which `build` needs."""
    facts = read_facts(data)
    for folder in facts.streams.values():
        with suppress(DataError):  # opening the shards fails later, with an error that names the stream
            read_index(folder.local / folder.card.index_file, folder.card.column, nested=folder.card.is_adopted)
    return facts


def _redraw(folder: RunFolder) -> None:
    """Write report.html when the run ends or fails; a failure to do so does not end the run."""
    from modernbert_train.report.page import write_report

    if not (folder.path / "metrics.jsonl").exists():
        return  # the run ended before its first line
    # everything else is saved, so a bug in the report is only a warning; `report` can be run again
    with errors_to(warn, Exception, before=f"{folder.path}/report.html could not be drawn: "):
        write_report(folder.path)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
