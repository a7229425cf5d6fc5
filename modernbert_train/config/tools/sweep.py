"""Every key of a sweep: the search space, the method, the figure, and how trials are run; read by `sweep`.

Keys of the space are keys of a run, written with their dots (`optim.lr`). The run's own loader checks whether they
exist and whether their values fit; this file checks the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING

from modernbert_train.config.knob import bound_mistakes, knob
from modernbert_train.core.text import is_folder_name


@dataclass(frozen=True, kw_only=True)
class DimensionConfig:
    """Values for one key of the run: choices, or all from low to high."""

    choices: list[Any] | None = None  # also null, lists, and sections, which are merged into the run's
    low: float | None = None  # smallest value, inclusive
    high: float | None = None  # largest value, inclusive
    log: bool = False  # search on a logarithmic scale
    step: float | None = None  # distance between values; None: any number, or every whole number
    points: int | None = None  # number of values from low to high for sampler=grid


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Stop trials whose held-out loss is worse than others' at the same number of tokens."""

    # median (Golovin et al. 2017): worse than half of them; hyperband (arXiv 1603.06560): not in the best third,
    # checked at min_tokens, three times that, nine times, ...
    name: Literal["none", "median", "hyperband"] = "none"
    interval_tokens: int | None = None  # tokens between validations; becomes eval.interval_tokens of every trial
    min_tokens: int = 0  # no trial is stopped before


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs that differ in a few keys, and the search for the best."""

    name: str = MISSING  # letters, digits, '.', '_' and '-'
    runs_folder: str = "runs"  # the sweep's folder is <runs_folder>/<name>, with a subfolder for each trial
    storage: str | None = None  # database URL, for several machines; None: a SQLite file in the sweep's folder
    run: list[str] = field(default_factory=list)  # YAML files of the run that is varied; later ones win
    overrides: list[str] = field(default_factory=list)  # for all trials, as on a command line: a.b=c
    space: dict[str, DimensionConfig] = field(default_factory=dict)  # key of the run -> its values
    # the figure to compare: the last held-out one, or the median over the second half of the steps
    objective: Literal["validation.loss", "validation.accuracy", "step.loss", "step.tokens_per_second"] = (
        "validation.loss"
    )
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler: Literal["tpe", "random", "grid"] = "tpe"  # tpe learns from earlier trials; grid tries every combination
    seed: int = knob(17, low=0)  # of the sampler; trials have the run's seed
    trials: int | None = knob(None, low=1)  # trials in all, may be raised later; None: every point of the grid
    startup_trials: int = knob(8, low=0)  # random trials before tpe begins; completed trials before median stops any
    prune: PruneConfig = field(default_factory=PruneConfig)
    workers: int = knob(1, low=1)  # trials at the same time on this machine, each with its share of the GPUs
    ranks: int | None = knob(None, low=1)  # processes of a trial; None: one for each GPU of its share, or one
    attempts: int = knob(3, low=1)  # starts of a crashing trial before it counts as failed
    # interval of heartbeats; a worker without one for three intervals counts as dead, and others resume its trial
    heartbeat_seconds: int = knob(30, low=1)

    @property
    def folder(self) -> str:
        return f"{self.runs_folder}/{self.name}"


# Keys whose change makes the held-out figures of two trials incomparable.
_YARDSTICK = ("eval", "data.validation", "data.tokenizer", "objective.eval_mask_rate")


def sweep_problems(config: SweepConfig) -> list[str]:
    """Find mistakes that need no run: an empty space, impossible ranges, a search that could not work.

    Returns:
        One message per problem (what, where, what to do); empty without problems.
    """
    return [*_number_problems(config), *_space_problems(config), *_search_problems(config)]


def _number_problems(config: SweepConfig) -> Iterator[str]:
    if not is_folder_name(config.name):
        yield f"name={config.name!r}: a sweep's name becomes its folder. Use letters, digits, '.', '_' and '-'."
    yield from bound_mistakes(config)
    if config.storage is not None and "://" not in config.storage:
        yield (
            f"storage={config.storage}: not a database URL. Write for example postgresql://user@host/database or "
            "sqlite:///path/of/file.db, or remove it for a file in the sweep's folder."
        )


def _space_problems(config: SweepConfig) -> Iterator[str]:
    if not config.run:
        yield "run: empty. Name the YAML of the run to vary, for example run: [yamls/quickstart.yaml]."
    if not config.space:
        yield "space: empty. Add at least one key of the run, for example optim.lr: {low: 1e-4, high: 3e-3, log: true}."
    for key, dimension in config.space.items():
        here = f"space.{key}"
        yield from _dimension_problems(here, dimension, config.sampler)
        if key in ("name", "runs_folder"):
            yield f"{here}: every trial has its own folder, which the sweep names. Remove it."
        within = [section for section in _YARDSTICK if key == section or key.startswith(f"{section}.")]
        if within and config.objective.startswith("validation."):
            yield (
                f"{here}: changes how objective={config.objective} is measured, so trials could not be compared. "
                "Remove it from the space; overrides may set it for all trials."
            )


def _dimension_problems(here: str, dimension: DimensionConfig, sampler: str) -> Iterator[str]:
    low, high, step = dimension.low, dimension.high, dimension.step
    if dimension.choices is not None:
        of_range = [key for key in ("low", "high", "step", "points") if getattr(dimension, key) is not None]
        if of_range or dimension.log:
            yield f"{here}: has choices and {', '.join(of_range or ['log'])}. Keep the choices, or the range."
        if not dimension.choices:
            yield f"{here}.choices: empty. Name the values to try."
        elif len({str(choice) for choice in dimension.choices}) < len(dimension.choices):
            yield f"{here}.choices={dimension.choices}: a value is listed twice. Remove one."
        return
    if low is None or high is None:
        yield f"{here}: needs choices, or low and high. For example {here}: {{low: 1e-4, high: 1e-2, log: true}}."
        return
    if not low < high:
        yield f"{here}: low={low:g} is not below high={high:g}. Swap them, or set the key in overrides."
    if dimension.log and low <= 0:
        yield f"{here}.low={low:g} with log: a logarithmic range begins above 0. Raise low, or remove log."
    if dimension.log and step is not None:
        yield f"{here}: has log and step, which exclude each other. Remove one; choices gives exact values."
    if step is not None and step <= 0:
        yield f"{here}.step={step:g}: must be above 0."
    if sampler == "grid" and step is None and (dimension.points is None or dimension.points < 2):
        yield f"{here}.points={dimension.points}: sampler=grid needs the number of values to try. Set at least 2."
    if dimension.points is not None and (sampler != "grid" or step is not None):
        yield f"{here}.points={dimension.points}: only sampler=grid reads it, and only without step. Remove it."


def _search_problems(config: SweepConfig) -> Iterator[str]:
    if config.trials is None and config.sampler != "grid":
        yield f"trials: not set, and sampler={config.sampler} never ends by itself. Set it, for example trials=30."
    if config.direction == "minimize" and config.objective in ("validation.accuracy", "step.tokens_per_second"):
        yield f"direction=minimize with objective={config.objective} looks for the worst. Set direction=maximize."
    if config.direction == "maximize" and config.objective.endswith(".loss"):
        yield f"direction=maximize with objective={config.objective} looks for the worst. Set direction=minimize."
    prune = config.prune
    if prune.name == "none":
        if prune.interval_tokens is not None or prune.min_tokens:
            yield "prune: has interval_tokens or min_tokens but name=none. Set prune.name to median or hyperband."
        return
    if not config.objective.startswith("validation."):
        yield f"prune.name={prune.name} with objective={config.objective}: only held-out figures are compared."
    if prune.interval_tokens is None or prune.interval_tokens < 1:
        yield f"prune.interval_tokens={prune.interval_tokens}: the interval at which trials are compared. Set it."
    if prune.min_tokens < (1 if prune.name == "hyperband" else 0):
        yield f"prune.min_tokens={prune.min_tokens}: must be at least 0, and for hyperband 1. Raise it."


def grid_values(dimension: DimensionConfig) -> list[float]:
    """Return the values of a range that a grid tries: `points` of them, or every step."""
    assert dimension.low is not None and dimension.high is not None
    low, high = dimension.low, dimension.high
    if dimension.step is not None:
        return [low + index * dimension.step for index in range(math.floor((high - low) / dimension.step + 1e-9) + 1)]
    assert dimension.points is not None
    shares = [index / (dimension.points - 1) for index in range(dimension.points)]
    if dimension.log:
        return [low if share == 0 else high if share == 1 else low * (high / low) ** share for share in shares]
    return [low + share * (high - low) for share in shares]
