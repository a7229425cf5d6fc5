"""State shared by the workers of a sweep: an Optuna study in a database, from which each worker takes trials.

A sweep has a fixed number of slots, the trials that a user counts; slot i has the folder trial-000i. An Optuna trial is
one attempt at a slot. Any worker adds an attempt to each unfinished slot without a live attempt, with the values of the
slot's earlier attempts. So a worker may die between any two statements: another finds and continues its work, and no
step ever has to be undone.

A live worker sends a heartbeat every few seconds (Optuna's). This file avoids two traps of Optuna 5.0: an attempt that
dies before its first heartbeat would count as running for ever, and on SQLite two workers could take the same one.
Optuna's callback for retries is not used: a worker that dies between the failure and the new attempt loses the slot.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
import sqlalchemy.event
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from launch.sweeps.heartbeats import heartbeats
from launch.sweeps.optuna_internals import draw, id_of
from launch.sweeps.space import Space
from modernbert_train.config.load import flat
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.core.claim import changes, refuse
from modernbert_train.errors import StorageError

# attributes of an attempt
SLOT = "slot"  # its trial, from 0
REASON = "reason"  # why the slot is over without a figure; a failed attempt without a reason is repeated
CODE = "code"  # exit code of a failed attempt
CRASH = "crash"  # exit code of an attempt that crashed by itself, and is repeated a few times
RETRY = "retry"  # number of the failed attempt that this one repeats on request; earlier ones do not count
_SPEC = "spec"  # attribute of the study
# may change between the starts of a sweep: how its trials run and their number, but not their search space
_CHANGEABLE = {
    "sweep": ("storage", "trials", "workers", "ranks", "attempts", "heartbeat_seconds", "runs_folder", "overrides"),
    "run": ("runs_folder", "launch", "logging", "loggers", "callbacks", "checkpoint", "data.num_workers"),
}
_BUSY_SECONDS = 60  # maximum wait for another worker that writes to the SQLite file
_OPENINGS = 5


class Store:
    """The study of one sweep.

    Args:
        space: the sweep's search space.

    Raises:
        ConfigError: the database holds another sweep with this name.
        StorageError: the database cannot be reached.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._sweep = space.sweep
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = _open(space.sweep)
        with _reachable(space.sweep):
            self.study = optuna.create_study(
                storage=self._storage,
                study_name=space.sweep.name,
                direction=space.sweep.direction,
                load_if_exists=True,
                pruner=_pruner(space),
            )
            self._compare()

    def attempts(self) -> list[FrozenTrial]:
        """Return all attempts, in order."""
        return self.study.get_trials(deepcopy=False)

    def claim(self) -> tuple[int, Trial] | None:
        """Take the next attempt, with values for every key of the space.

        Returns:
            The slot and the attempt, which is running from now on; None if no attempt is free at the moment.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        self._fill()
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        for attempt in sorted(waiting, key=lambda each: (each.user_attrs[SLOT], each.number)):
            # sent before the attempt runs, so that a death of its worker is noticed at any time
            self._storage.record_heartbeat(id_of(attempt))
            if self._take(attempt):
                return attempt.user_attrs[SLOT], self._draw(attempt)
        return None

    def is_over(self) -> bool:
        """Return True if every slot has its figure, or a reason for the lack of one."""
        by_slot = slots(self.attempts())
        return all(any(map(over, by_slot.get(slot, ()))) for slot in range(self._space.trials))

    def finish(self, trial: Trial, state: TrialState, value: float | None = None, **attributes: Any) -> bool:
        """End an attempt.

        Args:
            trial: the attempt.
            state: COMPLETE with a value, PRUNED, or FAIL; without a REASON the slot is then tried again.
            attributes: stored with the attempt.

        Returns:
            False if another worker has given up the attempt meanwhile, because this worker seemed dead.
        """
        with suppress(UpdateFinishedTrialError, ValueError):
            for name, attribute in attributes.items():
                trial.set_user_attr(name, attribute)
            self.study.tell(trial, value, state)
            return True
        return False

    def retry(self) -> None:
        """Add an attempt to each slot that has failed, with its values."""
        for slot, own in slots(self.attempts()).items():
            last = next((attempt for attempt in own if over(attempt)), None)
            if slot < self._space.trials and last is not None and last.state == TrialState.FAIL:
                self._add(slot, last.params, **{RETRY: last.number})

    def crashes(self, slot: int) -> int:
        """Count the attempts at a slot that failed by themselves."""
        return sum(CRASH in attempt.user_attrs for attempt in slots(self.attempts()).get(slot, ()))

    def reported(self, trial: Trial) -> dict[int, float]:
        """Return intermediate figures, by tokens."""
        return self._storage.get_trial(id_of(trial)).intermediate_values

    def alive(self, trial: Trial) -> AbstractContextManager[None]:
        """Send heartbeats inside this context."""
        return heartbeats(self._storage, id_of(trial), self._sweep.heartbeat_seconds)

    def reachable(self) -> Any:
        """Return a context in which faults of the database become a StorageError."""
        return _reachable(self._sweep)

    def _fill(self) -> None:
        by_slot = slots(self.attempts())
        for slot in range(self._space.trials):
            earlier = by_slot.get(slot, [])
            if any(over(attempt) or not attempt.state.is_finished() for attempt in earlier):
                continue
            params: Mapping[str, Any] = self._space.points[slot] if self._space.points else {}
            params = max((attempt.params for attempt in earlier), key=len, default=params) or params
            self._add(slot, params)

    def _add(self, slot: int, params: Mapping[str, Any], **attributes: Any) -> None:
        self.study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING,
                params=dict(params),
                distributions={key: self._space.distributions[key] for key in params},
                user_attrs={SLOT: slot, **attributes},
            )
        )

    def _take(self, attempt: FrozenTrial) -> bool:
        taken = False
        with suppress(UpdateFinishedTrialError):
            taken = self._storage.set_trial_state_values(id_of(attempt), TrialState.RUNNING)
        if not taken:
            return False
        others = slots(self.attempts())[attempt.user_attrs[SLOT]]
        if any(over(o) or (o.number < attempt.number and not o.state.is_finished()) for o in others):
            # two workers filled the slot at the same time; the first attempt counts
            self._storage.set_trial_state_values(id_of(attempt), TrialState.FAIL)
            return False
        return True

    def _draw(self, attempt: FrozenTrial) -> Trial:
        """Draw a value for every key; values of an earlier attempt are kept."""
        # the seed includes the slot, or all workers would draw the same values
        seed = zlib.crc32(f"{self._sweep.seed} {attempt.user_attrs[SLOT]}".encode())
        self.study.sampler = (
            optuna.samplers.TPESampler(n_startup_trials=self._sweep.startup_trials, multivariate=True, seed=seed)
            if self._sweep.sampler == "tpe"
            else optuna.samplers.RandomSampler(seed=seed)
        )
        return draw(self.study, attempt, self._space.distributions)

    def _compare(self) -> None:
        described = {"sweep": flat(self._sweep), "run": flat(self._space.first)}  # the overrides are in the run
        now = {
            part: {key: value for key, value in values.items() if not _may_change(part, key)}
            for part, values in json.loads(json.dumps(described)).items()
        }
        before = self.study.user_attrs.get(_SPEC)
        if before is None:
            self.study.set_user_attr(_SPEC, now)
            return
        changed = [f"{part}: {change}" for part in now for change in changes(before[part], now[part])]
        claim = f"{self._sweep.name}: a sweep with this name exists and searches another space"
        refuse(claim, changed, "Give this one another name, or restore the values.")


def slots(attempts: Sequence[FrozenTrial]) -> dict[int, list[FrozenTrial]]:
    """Group attempts by slot, in order, without those that were repeated on request."""
    by_slot: dict[int, list[FrozenTrial]] = {}
    repeated: dict[int, int] = {}
    for attempt in attempts:
        slot = attempt.user_attrs[SLOT]
        by_slot.setdefault(slot, []).append(attempt)
        repeated[slot] = max(repeated.get(slot, -1), attempt.user_attrs.get(RETRY, -1))
    return {slot: [each for each in own if each.number > repeated[slot]] for slot, own in sorted(by_slot.items())}


def over(attempt: FrozenTrial) -> bool:
    """Return True if the attempt's slot is finished."""
    return attempt.state in (TrialState.COMPLETE, TrialState.PRUNED) or (
        attempt.state == TrialState.FAIL and REASON in attempt.user_attrs
    )


def _may_change(part: str, key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _CHANGEABLE[part])


def _open(sweep: SweepConfig) -> RDBStorage:
    url = sweep.storage or f"sqlite:///{Path(sweep.folder) / 'sweep.db'}"
    arguments: dict[str, Any] = {"pool_pre_ping": True}
    if url.startswith("sqlite:"):
        Path(sweep.folder).mkdir(parents=True, exist_ok=True)
        arguments = {"connect_args": {"timeout": _BUSY_SECONDS}}
    with _reachable(sweep), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        for opening in range(_OPENINGS):
            try:
                storage = RDBStorage(
                    url,
                    engine_kwargs=arguments,
                    heartbeat_interval=sweep.heartbeat_seconds,
                    grace_period=3 * sweep.heartbeat_seconds,
                )
                break
            except (SQLAlchemyError, OptunaError):  # two workers may create the tables at the same time; one fails
                if opening == _OPENINGS - 1:
                    raise
                time.sleep(0.2 * (opening + 1))
        if url.startswith("sqlite:"):
            # sqlite3 begins a transaction only at the first write; values read before it may be outdated by then
            sqlalchemy.event.listen(storage.engine, "begin", _begin)
    return storage


def _begin(connection: sqlalchemy.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _reachable(sweep: SweepConfig) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, StorageInternalError, OptunaError, ImportError, OSError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        text = str(getattr(cause, "orig", None) or cause).splitlines()[0]
        raise StorageError(
            f"storage={_without_password(sweep)}: cannot be used ({text}). Check that the database runs, that the URL "
            "is right and its Python driver installed; without storage a SQLite file in the sweep's folder is used."
        ) from error


def _without_password(sweep: SweepConfig) -> str:
    if sweep.storage is None:
        return f"sqlite:///{sweep.folder}/sweep.db"
    with suppress(ArgumentError):
        return sqlalchemy.make_url(sweep.storage).render_as_string(hide_password=True)
    return sweep.storage.split("://", maxsplit=1)[0] + "://..."


def _pruner(space: Space) -> optuna.pruners.BasePruner:
    prune = space.sweep.prune
    if prune.name == "none":
        return optuna.pruners.NopPruner()
    if prune.name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=space.sweep.startup_trials, n_warmup_steps=prune.min_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return optuna.pruners.HyperbandPruner(min_resource=prune.min_tokens, max_resource=space.first.total_tokens)
