"""The search space: translate the spec's keys to the sampler's distributions, and drawn values to a run.

The run's own loader checks every key and value, so a sweep accepts exactly a run's keys and values, with the same error
messages.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.sweep import DimensionConfig, SweepConfig, grid_values, sweep_problems
from modernbert_train.core.files import errors_to
from modernbert_train.errors import ConfigError, RunError
from modernbert_train.plan.resolve import messages_of, resolve
from modernbert_train.weights.names import read_config

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Space:
    """A sweep whose keys and values are valid for the run.

    Attributes:
        sweep: the spec.
        distributions: key of the run -> the sampler's distribution.
        points: for sampler=grid every combination, in order; otherwise empty.
        first: the run with the first value of every key; shows the values that all trials share.
        others: the runs with another value of one key.
    """

    sweep: SweepConfig
    first: RunConfig
    others: Sequence[RunConfig]
    distributions: dict[str, BaseDistribution]
    points: Sequence[dict[str, Any]]

    @property
    def trials(self) -> int:
        """Total number of trials."""
        num_trials = self.sweep.trials
        if self.sweep.sampler != "grid":
            assert num_trials is not None
            return num_trials
        return len(self.points) if num_trials is None else min(num_trials, len(self.points))

    def run_config(self, slot: int, params: Params) -> RunConfig:
        """Return the run of one trial.

        Args:
            slot: the trial's number, from 0.
            params: drawn values, by key.

        Raises:
            ConfigError: the values do not fit together.
        """
        ours = [f"name={trial_name(slot)}", f"runs_folder={self.sweep.folder}", "launch.nodes=1"]
        if self.sweep.prune.interval_tokens is not None:
            ours.append(f"eval.interval_tokens={self.sweep.prune.interval_tokens}")
        return load_point(self.sweep, [*self.overrides(params), *ours])

    def overrides(self, params: Params) -> list[str]:
        """Format drawn values as command-line overrides."""
        return [override(key, _choice(self.sweep.space[key], value)) for key, value in params.items()]


def make_space(sweep: SweepConfig) -> Space:
    """Check the spec, and every value of its space against the run.

    Raises:
        ConfigError: all mistakes of the spec; a run's errors about unknown keys and wrong values; an objective that the
            run would never measure.
    """
    problems = sweep_problems(sweep)
    if problems:
        raise ConfigError("\n".join(problems))
    samples = {key: _samples(dimension) for key, dimension in sweep.space.items()}
    corner = {key: values[0] for key, values in samples.items()}
    config = _load(sweep, corner)
    messages, others = list[str](), list[RunConfig]()
    for key, values in samples.items():
        for value in values[1:]:
            with errors_to(messages.append, ConfigError):
                others.append(_load(sweep, corner | {key: value}))
    if messages:
        raise ConfigError("\n".join(dict.fromkeys(messages)))
    _check_objective(sweep, config)
    distributions = {key: _distribution(sweep, corner, key, dimension) for key, dimension in sweep.space.items()}
    return Space(sweep, config, others, distributions, _points(sweep, distributions) if sweep.sampler == "grid" else ())


def refuse_all(space: Space, num_ranks: Callable[[RunConfig], int]) -> None:
    """Refuse a sweep if `check` would refuse every trial for the same mistakes, before any of them costs time.

    Args:
        space: the search space.
        num_ranks: processes of a trial.

    Raises:
        RunError: mistakes of the first point that no other value of a single key avoids.
    """
    errors: list[RunError] = []
    for config in (space.first, *space.others):
        try:
            ours = replace(config, name=trial_name(0), runs_folder=space.sweep.folder)
            resolve(ours, num_ranks(config), purpose="sweep", fresh=True)
            return
        except RunError as error:
            errors.append(error)
    messages = [messages_of(error) for error in errors]
    if shared := [message for message in messages[0] if all(message in each for each in messages)]:
        raise type(errors[0])("\n".join(shared))


def load_point(sweep: SweepConfig, overrides: Sequence[str]) -> RunConfig:
    """Load the run with the sweep's overrides and further ones."""
    return read_config([Path(file) for file in sweep.run], [*sweep.overrides, *overrides])


def trial_name(slot: int) -> str:
    return f"trial-{slot:04d}"


def override(key: str, value: Any) -> str:
    """Format `a.b=c`, with c as JSON, which is YAML, so the run's loader reads the same value."""
    return f"{key}={json.dumps(value)}"


def label(choice: Any) -> str | int | float | bool | None:
    """Return a choice as the sampler stores it: itself, or text if it is a list or a section."""
    return choice if choice is None or isinstance(choice, (str, int, float, bool)) else json.dumps(choice)


def _choice(dimension: DimensionConfig, value: Any) -> Any:
    """Return the value of a label."""
    return next((choice for choice in dimension.choices or () if label(choice) == value), value)


def _samples(dimension: DimensionConfig) -> list[Any]:
    """Return values of a dimension for a trial load; whole numbers first, since every number key accepts them."""
    if dimension.choices is not None:
        return dimension.choices
    assert dimension.low is not None and dimension.high is not None
    return [int(bound) if bound.is_integer() else bound for bound in (dimension.low, dimension.high)]


def _load(sweep: SweepConfig, values: Mapping[str, Any]) -> RunConfig:
    try:
        return load_point(sweep, [override(key, value) for key, value in values.items()])
    except ConfigError as error:
        where = "overrides and space of the sweep"
        raise ConfigError(str(error).replace("(command line)", f"({where})")) from None


def _check_objective(sweep: SweepConfig, config: RunConfig) -> None:
    files = ", ".join(sweep.run)
    if sweep.objective.startswith("validation.") and config.data.validation is None:
        raise ConfigError(
            f"objective={sweep.objective}: {files} lacks data.validation, so no trial would measure it. Name held-out "
            "shards there or in overrides, or set objective=step.loss."
        )
    first = max(sweep.prune.interval_tokens or 0, sweep.prune.min_tokens)
    if sweep.prune.name != "none" and first >= config.total_tokens:
        raise ConfigError(
            f"prune: first compares trials at {first:,} tokens, and they end at {config.total_tokens:,}. Lower "
            "prune.interval_tokens and prune.min_tokens, or set prune.name=none."
        )


def _distribution(sweep: SweepConfig, corner: Params, key: str, dimension: DimensionConfig) -> BaseDistribution:
    if dimension.choices is not None:
        return CategoricalDistribution([label(choice) for choice in dimension.choices])
    low, high, step = dimension.low, dimension.high, dimension.step
    assert low is not None and high is not None
    if not _is_whole(sweep, corner, key):
        return FloatDistribution(low, high, log=dimension.log, step=step)
    if not all(bound.is_integer() for bound in (low, high, step or 1.0)):
        raise ConfigError(f"space.{key}: low={low:g}, high={high:g} and step must be whole, as {key} is. Round them.")
    return IntDistribution(int(low), int(high), log=dimension.log, step=int(step or 1))


def _is_whole(sweep: SweepConfig, corner: Params, key: str) -> bool:
    """Return True if a run accepts only whole numbers for this key, by trying its loader."""
    with suppress(ConfigError):
        load_point(sweep, [override(name, value) for name, value in (dict(corner) | {key: 0.5}).items()])
        return False
    return True


def _points(sweep: SweepConfig, distributions: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    axes: list[list[Any]] = []
    for key, distribution in distributions.items():
        dimension = sweep.space[key]
        if dimension.choices is not None:
            axes.append([label(choice) for choice in dimension.choices])
        elif isinstance(distribution, IntDistribution):
            axes.append(list(dict.fromkeys(round(value) for value in grid_values(dimension))))
        else:
            axes.append(list(grid_values(dimension)))
    return [dict(zip(distributions, point, strict=True)) for point in itertools.product(*axes)]
