"""A worker of a sweep: takes trials one after the other until all are over, and runs each as an ordinary launch.

How a trial ends decides what becomes of it. Finished: its figure is told. Refused by `check`, diverged or pruned: told
as a bad point, which the sampler learns from, and never run again. Saved (75) or lost: made again, which goes on from
its checkpoint. Crashed: made again a few times. The disk failed (74): the worker ends, since the next would fail too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from optuna.trial import Trial, TrialState

from launch.sweeps.many import ranks_of
from launch.sweeps.space import Params, Space
from launch.sweeps.store import CRASH, REASON, Store
from launch.sweeps.trial import (
    OUTPUT,
    TRIAL_YAML,
    Child,
    diverged,
    figure,
    hold,
    last_words,
    milestones,
    read_entries,
    tokens_seen,
    write_yaml,
)
from modernbert_train.config.check import check
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.check import check_data
from modernbert_train.errors import ConfigError, DataError, RunError, StoppedEarly, StorageError

LAUNCH = (sys.executable, str(Path(__file__).resolve().parents[1] / "run.py"))
_IDLE_SECONDS = 1.0
_USAGE = 64
# names by which launch/run.py would take a trial for a part of the job that the worker runs in
_OF_THE_JOB = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """Runs trials of one sweep in this process.

    Args:
        space: the sweep.
        command: what launches a run; the trial's YAML is added to it.
        environment: of the trials; None is this process's.

    Raises:
        ConfigError, StorageError: see `Store`.
    """

    def __init__(
        self, space: Space, command: Sequence[str] = LAUNCH, environment: Mapping[str, str] | None = None
    ) -> None:
        self._space = space
        self._sweep = space.sweep
        self._command = command
        given = dict(os.environ if environment is None else environment)
        self._environment = {name: value for name, value in given.items() if name not in _OF_THE_JOB}
        self._child: Child | None = None
        self._stopping = False
        self._store = Store(space)

    def run(self) -> None:
        """Take trials until all of them are over.

        Raises:
            DataError: the data of the run that is varied are missing or damaged.
            StorageError: the database or the disk failed.
            StoppedEarly: a signal came; the trial is saved, and whoever starts a worker goes on with it.
        """
        check_data(self._space.first)
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        waiting = False
        try:
            while not self._stopping:
                with self._store.reachable():
                    claimed = self._store.claim()
                    if claimed is None and self._store.is_over():
                        return
                if claimed is not None:
                    self._work(*claimed)
                elif not waiting:
                    print("the last trials are with other workers; waiting, in case one of them is lost", flush=True)
                waiting = claimed is None
                if waiting:
                    time.sleep(_IDLE_SECONDS)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        raise StoppedEarly(f"{self._sweep.name}: stopped and saved. The same command resumes.")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._child is not None:
            self._child.stop()

    def _work(self, slot: int, trial: Trial) -> None:
        with self._store.alive(trial):
            try:
                config = self._checked(slot, trial.params)
            except RunError as error:
                self._end(slot, trial, TrialState.PRUNED, f"refused: {error}")
                return
            try:
                self._launch(slot, trial, config)
            except OSError as error:
                self._end(slot, trial, TrialState.FAIL)
                raise StorageError(
                    f"{config.folder}: cannot be written ({error.strerror}). Free space or fix the permission; the "
                    "same command resumes."
                ) from error

    def _checked(self, slot: int, params: Params) -> RunConfig:
        config = self._space.run_config(slot, params)
        check(config, ranks_of(self._sweep, config))
        check_data(config)
        return config

    def _launch(self, slot: int, trial: Trial, config: RunConfig) -> None:
        folder = Path(config.folder)
        while (lock := hold(folder)) is None:
            if self._stopping:
                self._end(slot, trial, TrialState.FAIL)
                return
            time.sleep(_IDLE_SECONDS)
        with lock:
            point = " ".join(self._space.overrides(trial.params))
            seen = tokens_seen(read_entries(folder))
            print(f"trial {slot}: {point}" + (f", resumes at {seen:,} tokens" if seen else ""), flush=True)
            yaml = folder / TRIAL_YAML
            head = [f"Trial {slot} of {self._sweep.name}: {point}", "", f"  python -m modernbert_train launch {yaml}"]
            write_yaml(yaml, config, head)
            pruned = self._report(trial, folder)
            if pruned:
                self._end(slot, trial, TrialState.PRUNED, f"pruned at {seen:,} tokens")
                return
            code, pruned = self._wait(trial, folder, lock)
            self._judge(slot, trial, folder, code, pruned)

    def _wait(self, trial: Trial, folder: Path, lock: Any) -> tuple[int, bool]:
        """Run the trial's process; returns its exit code and whether it was ended because others are better."""
        ranks = self._sweep.ranks
        arguments = [] if ranks is None else ["--ranks", str(ranks)]
        pruned = False

        def look() -> None:
            nonlocal pruned
            if not pruned and self._report(trial, folder):
                pruned = True
                child.stop()

        child = self._child = Child(self._command, folder, arguments, lock, self._environment)
        try:
            if self._stopping:  # the signal came before there was a child to pass it to
                child.stop()
            code = child.wait(look)
        finally:
            self._child = None
        return code, pruned

    def _report(self, trial: Trial, folder: Path) -> bool:
        """Tell the trial's figures on the way; returns whether it lags behind others."""
        interval = self._sweep.prune.interval_tokens
        lags = False
        if interval is not None:
            with suppress(StorageError), self._store.reachable():  # a database that is away delays this, no more
                known = self._store.reported(trial)
                for tokens, value in milestones(read_entries(folder), self._sweep.objective, interval).items():
                    if tokens not in known:
                        trial.report(value, tokens)
                        lags = lags or trial.should_prune()
        return lags

    def _judge(self, slot: int, trial: Trial, folder: Path, code: int, pruned: bool) -> None:
        self._report(trial, folder)  # for the others to be compared with
        entries = read_entries(folder)
        tokens = tokens_seen(entries)
        crashed: int | None = None
        if code == 0 and (value := figure(entries, self._sweep.objective)) is not None:
            self._end(slot, trial, TrialState.COMPLETE, value=value)
        elif code == 0:
            self._end(slot, trial, TrialState.FAIL, f"finished without recording {self._sweep.objective}")
        elif pruned:
            self._end(slot, trial, TrialState.PRUNED, f"pruned at {tokens:,} tokens")
        elif reason := diverged(folder):
            self._end(slot, trial, TrialState.PRUNED, reason)
        elif code == StoppedEarly.exit_code or self._stopping:
            self._end(slot, trial, TrialState.FAIL)
        elif code in (_USAGE, DataError.exit_code, ConfigError.exit_code):
            self._end(slot, trial, TrialState.FAIL, f"exit code {code}: {last_words(folder)}")
        elif code == StorageError.exit_code:
            self._end(slot, trial, TrialState.FAIL)
            raise StorageError(f"trial {slot}: {last_words(folder)} All of it is in {folder / OUTPUT}.")
        else:
            crashed = code
            with self._store.reachable():
                last = self._store.crashes(slot) + 1 >= self._sweep.attempts
            text = f"exit code {code}: {last_words(folder)}"
            self._end(slot, trial, TrialState.FAIL, text if last else None, crashed=crashed)

    def _end(
        self,
        slot: int,
        trial: Trial,
        state: TrialState,
        reason: str | None = None,
        *,
        value: float | None = None,
        crashed: int | None = None,
    ) -> None:
        attributes: dict[str, Any] = {} if reason is None else {REASON: reason}
        if crashed is not None:
            attributes[CRASH] = crashed
        with self._store.reachable():
            ended = self._store.finish(trial, state, value, **attributes)
        if value is not None:
            text = f"{self._sweep.objective} {value:.5g}"
        else:
            text = reason or (f"exit code {crashed}, will be tried again" if crashed else "saved, to be gone on with")
        print(f"trial {slot}: {text}" + ("" if ended else " (others have taken it over)"), flush=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
