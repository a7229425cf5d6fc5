"""A worker of a sweep: takes trials until all are over, one or more at a time, and runs each as an ordinary launch.

The end of a trial decides the next step. Finished: its figure goes to the sampler. Refused by `check`, diverged, pruned
or with a figure that is not a number: reported as a bad point, from which the sampler learns, and never repeated. Saved
(75) or lost: repeated, which resumes from its checkpoint. Crashed: repeated a few times. Disk failure (74): the worker
ends, since the next trial would fail too.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from optuna.trial import Trial, TrialState

from launch.sweeps.places import ranks_of, shares
from launch.sweeps.space import Space, refuse_all, trial_name
from launch.sweeps.trial import (
    OUTPUT,
    TRIAL_YAML,
    diverged,
    figure,
    hold,
    milestones,
    read_entries,
    tokens_seen,
    write_yaml,
)
from launch.sweeps.trial_store import CODE, CRASH, REASON, Store
from modernbert_train.config.check import check
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.text import printable
from modernbert_train.data.check_shards import check_data
from modernbert_train.distributed.run_jobs import Job, last_words, run_all
from modernbert_train.distributed.visible_gpus import count_gpus
from modernbert_train.errors import ConfigError, DataError, RunError, StoppedEarly, StorageError

LAUNCH = (sys.executable, str(Path(__file__).resolve().parents[1] / "run.py"))
_USAGE = 64


@dataclass
class Attempt:
    """A running attempt at a trial.

    Attributes:
        slot: number of the trial.
        trial: Optuna's object of the attempt.
        held: its heartbeat and its folder's lock.
        pruned: True once it was stopped because others are better.
    """

    slot: int
    trial: Trial
    held: ExitStack = field(default_factory=ExitStack)
    pruned: bool = False


class Worker:
    """Runs trials of one sweep.

    Args:
        space: the sweep's search space.
        command: launches a run; the trial's YAML is appended.
        workers: number of parallel trials.

    Raises:
        RunError: see `refuse_all`, `shares` and `Store`.
    """

    def __init__(self, space: Space, command: Sequence[str] = LAUNCH, workers: int = 1) -> None:
        self._space = space
        self._sweep = space.sweep
        self._command = command
        self._places = shares(self._sweep, workers, os.environ, count_gpus(), os.cpu_count() or 1)
        self._under_way: dict[str, Attempt] = {}  # by its job's name, the trial's folder
        self._failure: StorageError | None = None
        refuse_all(space, self._ranks)
        self._store = Store(space)

    def _ranks(self, config: RunConfig) -> int:
        return ranks_of(self._sweep, config, count_gpus() // len(self._places))

    def run(self, *, retry: bool = False) -> None:
        """Take trials until all of them are over; with `retry` repeat those that have failed.

        Raises:
            StorageError: the database or the disk failed.
            StoppedEarly: a signal came; the trials are saved, and a new worker continues them.
        """
        if retry:
            with self._store.reachable():
                self._store.retry()
        try:
            with os_errors_as(
                StorageError,
                f"{self._sweep.folder}: cannot be written",
                "Free space or fix the permission; the same command resumes.",
            ):
                stopped = run_all(self._jobs(), self._places, self._judge, self._look)
        finally:
            for folder in list(self._under_way):
                self._end(folder, TrialState.FAIL)
        if self._failure is not None:
            raise self._failure
        if stopped:
            raise StoppedEarly(f"{self._sweep.name}: stopped and saved. The same command resumes.")

    def _jobs(self) -> Iterator[Job | None]:
        announced = False
        while self._failure is None:
            with self._store.reachable():
                claimed = self._store.claim()
                if claimed is None and self._store.is_over():
                    return
            if claimed is not None:
                announced = False
                yield from self._begin(*claimed)
                continue
            if not (announced or self._under_way):
                announced = True
                print("the last trials are with other workers; waiting, in case one of them is lost", flush=True)
            yield None

    def _begin(self, slot: int, trial: Trial) -> Iterator[Job | None]:
        """Yield the job of an attempt, once its folder is free; nothing if it is over before it starts."""
        folder = Path(self._sweep.folder, trial_name(slot))
        attempt = self._under_way[str(folder)] = Attempt(slot, trial)
        attempt.held.enter_context(self._store.alive(trial))
        try:
            config = self._space.run_config(slot, trial.params)
            check(config, self._ranks(config))
            check_data(config)
        except RunError as error:
            self._end(str(folder), TrialState.PRUNED, f"refused: {error}")
            return
        while (lock := hold(folder)) is None:
            yield None
        attempt.held.enter_context(lock)
        point = " ".join(self._space.overrides(trial.params))
        seen = tokens_seen(read_entries(folder))
        print(f"trial {slot}: {point}" + (f", resumes at {seen:,} tokens" if seen else ""), flush=True)
        yaml = folder / TRIAL_YAML
        head = [f"Trial {slot} of {self._sweep.name}: {point}", "", f"  python -m modernbert_train launch {yaml}"]
        write_yaml(yaml, config, head)
        if self._lags(trial, folder):
            self._end(str(folder), TrialState.PRUNED, f"pruned at {seen:,} tokens")
            return
        ranks = [] if self._sweep.ranks is None else ["--ranks", str(self._sweep.ranks)]
        # SIGTERM if this worker is killed: the trial saves, and keeps its folder locked until then
        yield Job(str(folder), [*self._command, str(yaml), *ranks], folder / OUTPUT, signal.SIGTERM, [lock.fileno()])

    def _look(self, job: Job) -> bool:
        """Return True, once, if a trial should stop because others are better."""
        attempt = self._under_way[job.name]
        if attempt.pruned:
            return False
        attempt.pruned = self._lags(attempt.trial, Path(job.name))
        return attempt.pruned

    def _lags(self, trial: Trial, folder: Path) -> bool:
        """Report the trial's figures so far; return True if it lags behind others."""
        interval = self._sweep.prune.interval_tokens
        lags = False
        if interval is not None:
            with suppress(StorageError), self._store.reachable():  # an unreachable database only delays this
                reported = self._store.reported(trial)
                for tokens, value in milestones(read_entries(folder), self._sweep.objective, interval).items():
                    if tokens not in reported:
                        trial.report(value, tokens)
                        lags = lags or trial.should_prune()
        return lags

    def _judge(self, job: Job, code: int) -> None:
        attempt, folder = self._under_way[job.name], Path(job.name)
        self._lags(attempt.trial, folder)  # other trials are compared with these figures
        entries = read_entries(folder)
        tokens, value = tokens_seen(entries), figure(entries, self._sweep.objective)
        if code == 0 and value is not None and math.isfinite(value):
            self._end(job.name, TrialState.COMPLETE, value=value)
        elif code == 0 and value is not None:
            self._end(job.name, TrialState.PRUNED, f"undefined: {self._sweep.objective} is not a number")
        elif code == 0:
            self._end(job.name, TrialState.FAIL, f"finished without recording {self._sweep.objective}")
        elif attempt.pruned:
            self._end(job.name, TrialState.PRUNED, f"pruned at {tokens:,} tokens")
        elif reason := diverged(folder):
            self._end(job.name, TrialState.PRUNED, reason)
        elif code == StoppedEarly.exit_code:
            self._end(job.name, TrialState.FAIL)
        elif code in (_USAGE, DataError.exit_code, ConfigError.exit_code):
            self._end(job.name, TrialState.FAIL, f"exit code {code}: {last_words(job.log)}", code=code)
        elif code == StorageError.exit_code:
            self._end(job.name, TrialState.FAIL)
            self._failure = StorageError(f"trial {attempt.slot}: {last_words(job.log)} All of it is in {job.log}.")
        else:
            with self._store.reachable():
                last = self._store.crashes(attempt.slot) + 1 >= self._sweep.attempts
            text = f"exit code {code}: {last_words(job.log)}"
            self._end(job.name, TrialState.FAIL, text if last else None, crashed=True, code=code)

    def _end(
        self,
        folder: str,
        state: TrialState,
        reason: str | None = None,
        *,
        value: float | None = None,
        code: int | None = None,
        crashed: bool = False,
    ) -> None:
        attempt = self._under_way.pop(folder)
        attributes_or_none = {REASON: reason, CODE: code, CRASH: code if crashed else None}
        attributes = {name: each for name, each in attributes_or_none.items() if each is not None}
        with attempt.held, self._store.reachable():
            ended = self._store.finish(attempt.trial, state, value, **attributes)
        if value is not None:
            text = f"{self._sweep.objective} {value:.5g}"
        else:
            text = reason or (f"exit code {code}, will be tried again" if crashed else "saved, to be resumed")
        end = "" if ended else " (others have taken it over)"
        print(printable(f"trial {attempt.slot}: {text}{end}"), flush=True)
