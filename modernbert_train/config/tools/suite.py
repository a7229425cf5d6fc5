"""Every key of a suite: the tasks of a table, how each is run and chosen, and published rows for comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import PurePath
from typing import Any

from omegaconf import MISSING

from modernbert_train.config.tools.retrieval import MTEB
from modernbert_train.core.text import is_plain_name
from modernbert_train.errors import ConfigError

_MAX_CHOICES = 10_000  # runs of a task for each model and seed


@dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """A file for a test server."""

    split: str = MISSING  # unlabelled split of the task's data; SUBSET/SPLIT for another subset
    labels: list[str] = field(
        default_factory=list
    )  # classes in the order of their numbers, to write numbers; []: write names
    between: list[float] = field(default_factory=list)  # a score is clipped to these two bounds; []: not clipped


@dataclass(frozen=True, kw_only=True)
class SuiteTaskConfig:
    """A task of a suite: exactly one of `finetune`, `retrieval`, `beir` and `mteb`."""

    finetune: str | None = None  # a task of yamls/tasks, or a YAML file; its name is relative to the suite's folder
    retrieval: str | None = None  # a recipe of `retrieval train`, with its evaluation sets
    beir: Any = None  # a folder in BEIR's format, a set of BEIR by name, or a list: a column of each, and the mean
    mteb: Any = None  # a task of mteb by name, or a list, as `beir`
    after: str | None = None  # another task of the suite: its chosen run with the same seed provides the first weights
    keys: dict[str, Any] = field(
        default_factory=dict
    )  # keys of the task or the run, such as {data: glue/RTE, max_tokens: 128}
    # keys with values to try, such as {lr: [1e-5, 3e-5]}, in all combinations: the best on `choose_on` is used
    choices: dict[str, list[Any]] = field(default_factory=dict)
    choose_on: str | None = None  # split that decides a choice; None: `split`
    choose_seeds: int | None = None  # number of seeds for the choice; None: all
    split: str | None = None  # split in the table; None: the mean of all that are measured
    metric: str | None = None  # None: the task's first; ndcg_at_10 for retrieval, main_score for mteb
    # files with predictions of the chosen run, by name without .tsv, in OUT/submission
    submit: dict[str, SubmitConfig] = field(default_factory=dict)

    @property
    def verb(self) -> tuple[str, ...]:
        """The verb that runs this task."""
        if self.finetune is not None:
            return ("finetune",)
        return ("retrieval", "train" if self.retrieval is not None else "evaluate")

    @property
    def argument(self) -> str:
        """The verb's first argument: task, recipe or folder."""
        return self.finetune or self.retrieval or self.beir or f"{MTEB}{self.mteb}"

    @property
    def trains(self) -> bool:
        """True if the task depends on the seed."""
        return self.finetune is not None or self.retrieval is not None


@dataclass(frozen=True, kw_only=True)
class PublishedConfig:
    """A row of published figures, which the table marks as such."""

    source: str = MISSING  # of the figures: the paper and its table
    figures: dict[str, float] = field(default_factory=dict)  # in percent, by task or group


@dataclass(frozen=True, kw_only=True)
class EfficiencyConfig:
    """Inference speed of the models: forward passes by text length, packed and padded."""

    lengths: list[int] = field(
        default_factory=lambda: [512, 8192]
    )  # tokens of a text; lengths that a model cannot read are omitted
    tokens: int = 262_144  # tokens to read for each length
    repeats: int = 3  # the median is reported


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """A table: rows are models, columns are tasks."""

    tasks: dict[str, SuiteTaskConfig] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [1618])  # for each task that depends on one
    groups: dict[str, list[str]] = field(default_factory=dict)  # columns with the mean of some tasks, by name
    efficiency: EfficiencyConfig | None = None  # a second table; None: not measured
    published: dict[str, PublishedConfig] = field(default_factory=dict)  # by model


def each_alone(suite: SuiteConfig) -> SuiteConfig:
    """Return a suite in which a task of several sets is one task of each, TASK-SET, and a group with the task's name.

    Raises:
        ConfigError: two tasks or groups would have the same name.
    """
    tasks: dict[str, SuiteTaskConfig] = {}
    groups = dict(suite.groups)
    for name, task in suite.tasks.items():
        key = next((key for key in ("beir", "mteb") if isinstance(getattr(task, key), list)), None)
        if key is None:
            tasks[name] = task
            continue
        groups[name] = []
        for each in getattr(task, key):
            own = f"{name}-{re.sub('[^A-Za-z0-9]+', '-', PurePath(str(each)).name)}"
            if own in tasks or own in suite.tasks or name in suite.groups:
                raise ConfigError(f"tasks.{name}: {own} or {name} would exist twice. Rename sets or tasks.")
            tasks[own] = replace(task, **{key: each})
            groups[name].append(own)
    return replace(suite, tasks=tasks, groups=groups)


def suite_problems(suite: SuiteConfig) -> Iterator[str]:
    """Yield mistakes in a suite that can be found without its tasks."""
    if not suite.tasks and suite.efficiency is None:
        yield "tasks: empty. Name one: tasks: {sst2: {finetune: sst2}}."
    if (speed := suite.efficiency) is not None and (
        min([*speed.lengths, speed.tokens], default=0) < 16 or speed.repeats < 1
    ):
        yield f"efficiency={speed}: name lengths and tokens from 16, and at least one repeat."
    if not suite.seeds or len({*suite.seeds}) < len(suite.seeds):
        yield f"seeds={suite.seeds}: name at least one, each once."
    for name, task in suite.tasks.items():
        yield from (f"tasks.{name}.{problem}" for problem in _task_problems(name, task, suite))
    columns = suite.tasks.keys() | suite.groups.keys()
    for name, members in suite.groups.items():
        if name in suite.tasks or not members or not suite.tasks.keys() >= {*members}:
            yield f"groups.{name}={members}: must list tasks, under a new name. Tasks are {', '.join(suite.tasks)}."
    for model, row in suite.published.items():
        if unknown := sorted(row.figures.keys() - columns):
            yield f"published.{model}: {', '.join(unknown)} is not a task or group of this suite."


def _task_problems(name: str, task: SuiteTaskConfig, suite: SuiteConfig) -> Iterator[str]:
    if not is_plain_name(name):
        yield "name: it is part of the names of folders. Use letters, digits, '_' and '-'."
    if sum(each is not None for each in (task.finetune, task.retrieval, task.beir, task.mteb)) != 1:
        yield "finetune, retrieval, beir, mteb: name exactly one of them."
    for key in ("beir", "mteb"):
        if not isinstance(getattr(task, key), str | None):
            yield f"{key}={getattr(task, key)}: name a set, or a list of some."
    if task.after is not None:
        first = suite.tasks.get(task.after)
        if first is None or first.after is not None or not first.trains:
            yield f"after={task.after}: name a trained task of the suite that does not itself come after another."
        elif task.retrieval is not None:
            yield "after: `retrieval train` starts from the model itself. Leave it out."
        elif task.finetune is not None and first.finetune is None:
            yield f"after={task.after}: a model of `retrieval train` is for `beir` and `mteb`. Leave it out."
    if task.submit and task.finetune is None:
        yield "submit: only for `finetune`."
    for file, part in task.submit.items():
        if not is_plain_name(file):
            yield f"submit.{file}: it is the name of a file. Use letters, digits, '_' and '-'."
        if part.between and (len(part.between) != 2 or part.between[0] >= part.between[1]):
            yield f"submit.{file}.between={part.between}: name the lowest score and the highest."
        if {"", ".", ".."} & {*part.split.split("/")}:
            yield f"submit.{file}.split={part.split}: name a split of the task's data, or SUBSET/SPLIT."
    if not task.trains and task.choices:
        yield "choices: `beir` and `mteb` measure a model as it is; there are no choices."
    if (number := prod(map(len, task.choices.values()))) > _MAX_CHOICES:
        yield f"choices: their values make {number:,} runs, at most {_MAX_CHOICES:,} are tried. Name fewer values."
    for key, values in task.choices.items():
        if not values or key in task.keys:
            yield f"choices.{key}={values}: name the values to try here, and no other value in keys."
    if task.choose_seeds is not None and not 1 <= task.choose_seeds <= len(suite.seeds):
        yield f"choose_seeds={task.choose_seeds}: there are {len(suite.seeds)} seeds."
