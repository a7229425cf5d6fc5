"""One start of a run, from its configuration to its last line: what `python -m modernbert_train train` does.

The ranks join and agree, the run's folder is taken over, the place to start from is found (start.py), the loop is built
(build.py), its weights are filled in, and it runs (step.py).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial

import torch
from composer import Callback
from composer.core import State

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.checkpoints.second_home import SecondHome, bring_back, refuse_fresh
from modernbert_train.clock import position_at
from modernbert_train.config.check import check
from modernbert_train.config.load import flat
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.data.dataset_card import file_sha256, file_xxh3
from modernbert_train.data.facts import DataFacts, read_facts
from modernbert_train.data.fingerprint import TEACHER, data_fingerprint
from modernbert_train.data.shard_index import ShardIndex, read_index
from modernbert_train.data.statistics import run_statistics
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
from modernbert_train.distributed.same_run import require_agreement
from modernbert_train.distributed.save_requests import Requests
from modernbert_train.distributed.transport import warn_of_slow_network
from modernbert_train.errors import ConfigError, DataError, Halved, StoppedEarly, StorageError
from modernbert_train.models.distilled import Distilled
from modernbert_train.plan.card import card_of_all, speed_lines
from modernbert_train.plan.halved import halve, is_full
from modernbert_train.plan.preflight import preflight
from modernbert_train.plan.room import too_large
from modernbert_train.plan.tuned import take
from modernbert_train.report.banner import banner
from modernbert_train.report.before_after import before_and_after
from modernbert_train.report.closing import closing_text, next_commands
from modernbert_train.report.effective import spent
from modernbert_train.report.progress import stage
from modernbert_train.report.training_loss import losses_of, training_loss
from modernbert_train.train import composer_internals
from modernbert_train.train.adapters import inner_model
from modernbert_train.train.build import build
from modernbert_train.train.callbacks import build_callbacks, check_loggers, own_callbacks
from modernbert_train.train.out_of_memory import out_of_memory
from modernbert_train.train.start import (
    Start,
    any_checkpoint,
    check_same_data,
    fill,
    find_branch,
    find_start,
    origin_text,
    record_start,
)
from modernbert_train.weights.source import Origin, find_origin
from modernbert_train.weights.teacher import find_teacher
from modernbert_train.weights.token_effect import describe_effects, effects


def train(config: RunConfig, *, fresh: bool = False, callbacks: Sequence[Callback | type[Callback]] = ()) -> None:
    """Train a run to its end, from wherever it stands.

    Args:
        config: the run; its rules are checked again with the true number of ranks.
        fresh: put what the run's folder holds aside and start from scratch.
        callbacks: of the calling program, beside those that the run names.

    Raises:
        RunError: anything that the user has to fix; StoppedEarly when a signal ended the run after a checkpoint; Halved
            where several ranks are to be started again.
    """
    while True:
        try:
            _start(config, callbacks, fresh=fresh)
            return
        except Halved as halved:
            if num_ranks() > 1:
                raise
            print(halved, file=sys.stderr, flush=True)
        fresh = False  # else what was noted would be put aside
        gc.collect()  # the trainer that was full, whose parts hold each other
        torch.cuda.empty_cache()


def _start(given: RunConfig, callbacks: Sequence[Callback | type[Callback]], *, fresh: bool) -> None:
    composer_internals.install()
    compute = Compute.of(given)
    requests = Requests(given.checkpoint.interval_seconds)
    with (
        closing(requests),
        SecondHome(given, _say) as second_home,
        joined(compute.device, given.distributed.timeout_seconds),
    ):
        _agree(given, compute, fresh=fresh)
        guests = build_callbacks(given, compute.device) + own_callbacks(callbacks)
        check_loggers(given)
        # before the folder is made, so that a mistake in it can be fixed under the same name
        on_rank_zero_slowly(lambda: refuse_fresh(given) if fresh else bring_back(given, _say))
        config, tuned, speed = _settle(given, compute, fresh=fresh)
        use_threads(config, compute.device)
        folder = RunFolder(config)
        origin, branch = _find_first(config, folder, fresh=fresh)
        changed = on_rank_zero(lambda: folder.open(fresh=fresh))
        if this_rank() == 0 and changed:
            print("changed since the last start:", *changed, sep="\n  ")
        try:
            start = branch or on_rank_zero_slowly(lambda: find_start(folder))  # it reads and hashes a checkpoint
            if this_rank() == 0:
                second_home.start()
            if start.tokens < config.total_tokens:
                _train(given, config, folder, compute, origin, start, guests, requests, tuned, speed)
            else:
                _say_trained(config, folder, start)
        finally:
            folder.close()


def _agree(config: RunConfig, compute: Compute, *, fresh: bool) -> None:
    """Check the rules with the true number of ranks, and that all of them have the same run, code and data.

    Raises:
        ConfigError, DataError: a rule is broken, or the ranks differ.
    """
    check(config, num_ranks())
    if num_ranks() > 1:
        read = partial(_read_facts, config)
        facts = read_once_per_node(read, file_sha256, file_xxh3, ShardIndex)
        require_agreement(config, data_fingerprint(facts))
        on_rank_zero(lambda: preflight(config, num_ranks(), fresh=fresh))
    if compute.device.type == "cuda" and num_ranks() > ranks_per_node() and local_rank() == 0:
        warn_of_slow_network()  # of each machine, since they may differ


def _settle(given: RunConfig, compute: Compute, *, fresh: bool) -> tuple[RunConfig, str, list[str]]:
    """Fill in what was left open: the same on all ranks, as rank 0 finds it for the smallest of their GPUs.

    Returns:
        The run as it trains; where its settings come from; lines on its speed.

    Raises:
        ConfigError: it needs more memory than a GPU has.
    """
    card, ranks = card_of_all(compute), num_ranks()
    config, tuned = on_rank_zero(lambda: take(given, compute, card=card, ranks=ranks, fresh=fresh))
    if card is not None and (mistakes := [*too_large(config, card, ranks)]):
        raise ConfigError("\n".join(mistakes))
    return config, tuned, [*speed_lines(given, config, card, ranks)]


def _find_first(config: RunConfig, folder: RunFolder, *, fresh: bool) -> tuple[Origin | None, Start | None]:
    """Of a run without a checkpoint of its own: the weights it begins with, or the run that it continues."""
    if not on_rank_zero(lambda: fresh or not any_checkpoint(folder)):
        return None, None
    return on_rank_zero(lambda: find_origin(config)), on_rank_zero(lambda: find_branch(config))


def _say_trained(config: RunConfig, folder: RunFolder, start: Start) -> None:
    on_rank_zero(folder.save_config)
    if this_rank() == 0:
        print(f"{config.name}: already trained to its end, {start.tokens:,} tokens. Nothing to do.")
        if (compared := before_and_after(config, folder.read_metrics())) is not None:
            print(compared)
        print(next_commands(config))


def _train(
    given: RunConfig,
    config: RunConfig,
    folder: RunFolder,
    compute: Compute,
    origin: Origin | None,
    start: Start,
    callbacks: list[Callback],
    requests: Requests,
    tuned: str,
    speed: list[str],
) -> None:
    facts = check_data(config)
    teacher = on_rank_zero_slowly(lambda: find_teacher(config))  # it reads and hashes all weights
    taught = {} if teacher is None else {TEACHER: teacher.sha256}
    fingerprint = check_same_data(start, config, data_fingerprint(facts) | taught)
    on_rank_zero(folder.save_config)
    on_rank_zero(lambda: folder.save_data(asdict(run_statistics(facts))))
    loop = build(config, facts, compute, folder, fingerprint, requests, callbacks, last_phase=start.phase)
    words = on_rank_zero(lambda: {} if start.checkpoint or origin is None else effects(config, facts, origin))
    if this_rank() == 0:
        lines = banner(
            config,
            origin=origin_text(start, origin),
            teacher=None if teacher is None else teacher.describe(),
            vocabulary=describe_effects(words),
            facts=facts,
            compute=compute,
            tuned=tuned,
            speed=speed,
            ranks=num_ranks(),
            ranks_per_node=ranks_per_node(),
        )
        print(lines, flush=True)
    fill(config, loop, start, origin)
    if teacher is not None:
        stage(f"reading the teacher from {teacher.source.folder}")
        model = inner_model(loop.trainer.state.model)
        assert isinstance(model, Distilled)
        model.listen(teacher.read(config, compute.device, bf16=compute.bf16))
    loop.checkpoints.restarted = on_rank_zero(lambda: record_start(folder, start, origin, words, compute.device))
    loop.trainer.logger.log_hyperparameters(flat(config))
    requests.listen()
    stage(
        "compiling the layers, and training the first batch" if config.compute.compile else "training the first batch"
    )
    release_freed_memory()
    if compute.device.type == "cpu":
        keep_freed_memory()
    try:
        with _halving(given, config, loop.trainer.state, compute):
            loop.trainer.fit()
        loop.checkpoints.finish()
    except Exception as raised:  # told, recorded, and raised again
        full = out_of_memory(raised, config, loop.trainer.state, compute.device)
        error = full or raised
        if is_own(error):  # else a lost rank may be what the checkpoint waits for
            if num_ranks() > 1:
                show(error)
            loop.checkpoints.settle()
        tell_others(error)  # before the loggers are closed, which can take its time
        if this_rank() == 0:
            with suppress(StorageError):  # the error that ended the run is the one to be told
                folder.record_start({"kind": "end", "outcome": "failed", "error": _first_line(error)})
        if full is not None:
            raise full from raised
        raise
    finally:
        if num_ranks() == 1:
            loop.checkpoints.settle()
        requests.trained = True
        loop.close()
        if this_rank() == 0:
            _redraw(folder)
        composer_internals.close(loop.trainer)
    outcome = "stopped" if loop.stopped else "finished"
    on_rank_zero(lambda: folder.record_start({"kind": "end", "outcome": outcome}))
    at = loop.trainer.state.timestamp
    if loop.stopped:
        raise StoppedEarly(
            f"{folder.path}: stopped at {at.token.value:,} of {config.total_tokens:,} tokens, "
            "checkpoint written. The same command resumes from here."
        )
    if this_rank() == 0:
        held_out = loop.measurements.held_out
        metrics = folder.read_metrics()
        loss = training_loss(losses_of(metrics))
        compared = before_and_after(config, metrics)
        tokens, steps = at.token.value, at.batch.value
        text = closing_text(
            config,
            tokens=tokens,
            steps=steps,
            loss=loss,
            held_out=None if held_out is None else str(held_out),
            compared=compared,
            spent=str(spent(folder.path)),
        )
        print(text)


@contextmanager
def _halving(given: RunConfig, config: RunConfig, state: State, compute: Compute) -> Iterator[None]:
    """Within it a run trains; where a GPU runs out of memory at a microbatch that nobody gave, see halved.py."""
    try:
        yield
    except RuntimeError as error:
        if compute.device.type == "cpu" or not is_full(error):
            raise
        plan = getattr(state.batch, "plan", None)  # a microbatch has none, and then its step has not been counted yet
        phase = position_at(config, state.timestamp.token.value).name if plan is None else plan.phase
        if (instead := halve(given, config, phase)) is None:
            raise
        raise instead from error


def _read_facts(config: RunConfig) -> DataFacts:
    """The facts of a run's data, and the index of each of its folders, which `build` asks for."""
    facts = read_facts(config)
    for folder in facts.streams.values():
        with suppress(DataError):  # whoever opens the shards says which stream it is of
            read_index(folder.local / folder.card.index_file, folder.card.column, nested=folder.card.is_adopted)
    return facts


def _redraw(folder: RunFolder) -> None:
    """Redraw report.html as the run ends, for whatever reason; a failure to draw never costs the run."""
    from modernbert_train.report.page import write_report

    if not (folder.path / "metrics.jsonl").exists():
        return  # it ended before its first line: there is nothing to draw
    try:
        write_report(folder.path)
    except Exception as error:  # all is saved, and `report` draws it again, or tells the bug
        print(f"warning: {folder.path}/report.html could not be drawn: {type(error).__name__}: {error}")


def _say(line: str) -> None:
    print(line, flush=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
