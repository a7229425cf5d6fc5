"""List the runs of a suite: each task with each model, choice and seed; some start from another run's weights.

The name of a run has a digest of all that decides its figures. So another rate, seed or text is another run, and no
result is mistaken for one of other settings.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from modernbert_train.config.load import load_typed
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.config.tools.retrieval import RANKING, MeasureConfig, RetrievalConfig
from modernbert_train.config.tools.suite import SuiteConfig, SuiteTaskConfig, each_alone, suite_problems
from modernbert_train.core.files import errors_to
from modernbert_train.core.installed import YAMLS
from modernbert_train.errors import ConfigError, RunError
from modernbert_train.evaluate.finetune.kinds import kind_of
from modernbert_train.evaluate.finetune.result import RESULT, read_result
from modernbert_train.evaluate.finetune.task import (
    FROZEN,
    as_trained,
    asked,
    check_run,
    labels_of,
    named_model,
    read_task,
    run_name,
)
from modernbert_train.evaluate.retrieval.bm25 import BM25, OF_ENCODERS
from modernbert_train.evaluate.retrieval.retrieval_recipe import read_recipe
from modernbert_train.evaluate.retrieval.runs import MODEL
from modernbert_train.evaluate.suite.cells import Cell, Failure, Failures, forget, log_of
from modernbert_train.weights.names import weights_hash

NDCG, MAIN_SCORE = RANKING[0], "main_score"
_OWN = ("name", "runs_folder", "seed")  # keys that differ between the runs
_SUITES = YAMLS / "suites"


class Standing(NamedTuple):
    """The state of a run: its figure, or the reason for its absence, or not finished.

    Attributes:
        value: the figure.
        problem: the reason.
        cell: the run; None while its first weights are missing.
    """

    value: float | None = None
    problem: str | None = None
    cell: Cell | None = None


class Choice(NamedTuple):
    """Values of the keys that a task's `choices` leave open."""

    values: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return ", ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in self.values
        )

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(_word(key, value) for key, value in self.values)


NO_CHOICE = Choice(())


def _word(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value) if isinstance(value, (list, dict, bool)) or value is None else value}"


def read_suite(name: str) -> tuple[SuiteConfig, Path]:
    """Return a suite by its name or file, and the folder that its paths are relative to.

    Raises:
        ConfigError: it is unknown, or it or its tasks have mistakes; names all of them.
    """
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        file = _SUITES / f"{name}.yaml"
        if not file.is_file():
            suites = ", ".join(sorted(path.stem for path in _SUITES.glob("*.yaml")))
            raise ConfigError(f"--suite {name}: there is none. Known: {suites}. Or name a YAML file of your own.")
    suite = each_alone(load_typed(SuiteConfig, [file]))
    if problems := list(suite_problems(suite)):
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    return suite, file.parent


class Plan:
    """The runs of a suite.

    Args:
        suite: the tasks.
        home: folder of the suite's file.
        models: as they are named.
        seeds: override the suite's; None: the suite's.
        out: folder of the runs.
        overrides: keys of every fine-tuning.

    Raises:
        ConfigError: a task or a recipe cannot be read.
    """

    def __init__(
        self,
        suite: SuiteConfig,
        home: Path,
        models: Sequence[str],
        seeds: Sequence[int] | None,
        out: Path,
        overrides: Sequence[str],
    ) -> None:
        self.suite, self.models, self.out = suite, models, out
        self.failures: Failures = {}  # of runs, by name
        self.seeds = list(seeds or suite.seeds)
        self.labels = labels_of(models)
        self._home, self._overrides = home, tuple(overrides)
        # the table is written after every run, and reads every cell
        self._read_task, self._load, self._read_recipe = cache(read_task), cache(load_typed), cache(read_recipe)
        self._check_run = cache(check_run)
        self.weights_now = cache(weights_hash)
        if len({*self.seeds}) < len(self.seeds):
            raise ConfigError(f"--seeds {' '.join(map(str, self.seeds))}: one is named twice. Name each once.")
        own = [each for each in overrides if each.partition("=")[0] in _OWN]
        problems = [f"{each}: each of several runs has its own. Use --out and --seeds." for each in own]
        for name in suite.tasks:
            with errors_to(problems.append, ConfigError, before=f"tasks.{name}: "):
                problems += [f"tasks.{name}.{problem}" for problem in self._problems(name)]
        if problems:
            raise ConfigError("\n".join(problems))

    def _problems(self, name: str) -> Iterator[str]:
        """Yield mistakes that would leave every cell of a task empty, found before anything runs."""
        task = self.suite.tasks[name]
        for choice in choices_of(task):
            settings = self.settings_of(name, self.models[0], choice)
            if task.trains:
                read = self._read_recipe if task.finetune is None else self._read_task
                self._check_run(tuple(read(self._what(task), self._words(name, choice))[1]), tuple(self.models))
        if (config := self.finetuned(name)) is not None:
            splits, metrics, kind = list(config.validation), config.measured, kind_of(config.kind)
            for file, part in task.submit.items():
                yield from (f"submit.{file}.{problem}" for problem in kind.submit_problems(part, config.labels))
        elif task.mteb is not None:
            splits, metrics = [str(task.mteb)], [MAIN_SCORE]
        else:
            splits, metrics = list(settings.get("evaluate", [Path(task.argument).name])), list(RANKING)
        for key, value, choices in (
            ("split", task.split, splits),
            ("choose_on", task.choose_on, splits),
            ("metric", task.metric, metrics),
        ):
            if value is not None and value not in choices:
                yield f"{key}={value}: is not measured. Choose from {', '.join(choices)}."
        if not splits:
            yield f"{task.argument}: nothing to measure on. Name BEIR folders in keys: {{evaluate: {{NAME: FOLDER}}}}."

    @property
    def levels(self) -> list[list[str]]:
        """The names of the tasks in order: first those that need no other task, then those with `after`."""
        levels = [
            [name for name, task in self.suite.tasks.items() if (task.after is not None) == later]
            for later in (False, True)
        ]
        return [each for each in levels if each]

    def metric(self, name: str) -> str:
        """Return the metric in the table."""
        task = self.suite.tasks[name]
        if task.metric is not None:
            return task.metric
        if (config := self.finetuned(name)) is None:
            return NDCG if task.mteb is None else MAIN_SCORE
        return config.measured[0]

    def finetuned(self, name: str) -> TaskConfig | None:
        """Return the task that `finetune` trains, without its choices; None for retrieval."""
        return None if self.suite.tasks[name].finetune is None else cast(TaskConfig, self.config_of(name, NO_CHOICE))

    def config_of(self, name: str, choice: Choice) -> TaskConfig | RetrievalConfig | MeasureConfig:
        """Return the task, the recipe or the keys of `retrieval evaluate`."""
        task, words = self.suite.tasks[name], self._words(name, choice)
        if task.finetune is not None:
            return self._read_task(self._what(task), words)[0]
        if task.retrieval is not None:
            return self._read_recipe(self._what(task), words)[0]
        return self._load(MeasureConfig, (), words)

    def seeds_of(self, name: str) -> list[int | None]:
        """Return the seeds of a task; [None] if it is not random."""
        task = self.suite.tasks[name]
        return list(self.seeds) if task.trains or task.after is not None else [None]

    def choosing_seeds(self, name: str) -> list[int | None]:
        """Return seeds with which a choice is made."""
        task, seeds = self.suite.tasks[name], self.seeds_of(name)
        return seeds[: task.choose_seeds] if len(choices_of(task)) > 1 else seeds

    def choices(self, name: str, model: str) -> list[Choice]:
        """Return the choices of a task that differ for a model: a frozen encoder ignores lr and lora."""
        task, choices = self.suite.tasks[name], dict[str, Choice]()
        for choice in choices_of(task):
            if task.finetune is None:
                return choices_of(task)
            config, run_overrides = self._read_task(self._what(task), self._words(name, choice))
            trained = asdict(as_trained(config, named_model(model), 0)) | {"frozen": None}  # applied, or ignored
            choices.setdefault(repr((trained, run_overrides)), choice)
        return [*choices.values()]

    def cell(self, name: str, model: str, choice: Choice, seed: int | None) -> Cell | None:
        """Return a run; None until the run that it starts from is finished."""
        task, named = self.suite.tasks[name], named_model(model)
        source = model
        if task.after is not None:
            before = self.chosen(task.after, model)
            first = None if before is None else self.cell(task.after, model, before, seed)
            if first is None or (result := self.result(first)) is None:
                return None
            source = str(self.out / first.name / self._counted(task.after, result))
        if FROZEN in named.baseline:
            # a chain keeps the encoder frozen; retrieval is measured with the encoder as it is
            source = source.replace(f"{FROZEN}:", "", 1)
            source = source if task.finetune is None else f"{FROZEN}:{source}"
        run = self._name(name, model, self.settings_of(name, source, choice), seed)
        own, words = seed if task.trains else None, self._words(name, choice)
        if model == BM25:
            words = tuple(each for each in words if each.partition("=")[0] not in OF_ENCODERS)
        return Cell(self._what(task), source, own, run, words, task.verb, texts=name)

    def _name(self, task: str, model: str, asked: Any, seed: int | None) -> str:
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:8]
        return run_name(task, self.labels[model], f"{digest}-{'once' if seed is None else seed}")

    def part(self, name: str, model: str, task: str, source: str, words: Sequence[str], module: str) -> Cell:
        """Return a run that is no cell of the table: a speed or a submission of a model.

        Args:
            name: of this kind of part.
            model: the row.
            task, words, module: its command.
            source: the model of the command.
        """
        run = self._name(name, model, {"task": task, "model": source, "words": list(words)}, None)
        return Cell(task, source, None, run, tuple(words), (), module=module)

    def _counted(self, name: str, result: Mapping[str, Any]) -> str:
        """Return the path of the weights that were measured, in a run's folder: with `best`, not always the newest."""
        if self.suite.tasks[name].retrieval is not None:
            return MODEL
        return f"checkpoints/{result['counted']['checkpoint']}" if result["settings"].get("best") is not None else ""

    def unfit(self, name: str, model: str) -> str | None:
        """Return the reason why a model cannot be in a column, or None."""
        task = self.suite.tasks[name]
        if model == BM25 and (task.finetune is not None or task.retrieval is not None):
            return "not run: bm25 has no weights to train"
        if FROZEN in named_model(model).baseline and task.retrieval is not None:
            return "not run: retrieval trains the encoder itself, so it cannot be frozen"
        return None if task.after is None else self.unfit(task.after, model)

    def standing(self, name: str, model: str, choice: Choice, seed: int | None, split: str | None) -> Standing:
        """Return the state of a run, with its figure of one split, or the mean of all."""
        after = self.suite.tasks[name].after
        if (reason := self.unfit(name, model)) is not None:
            return Standing(problem=reason)
        cell = self.cell(name, model, choice, seed)
        if cell is None and after is not None:
            chosen = self.chosen(after, model)
            first = self._standings(after, model, seed, chosen)
            lost = all(each.problem is not None for each in first)
            return Standing(problem=f"{after}: {first[0].problem}" if lost else None)
        result = None if cell is None else self.result(cell)
        if cell is None or result is None:
            failure = None if cell is None else self.failures.get(cell.name)
            return Standing(problem=None if failure is None else str(failure), cell=cell)
        value = self.value(name, result, split)
        undefined = f"{self.metric(name)} is undefined, not a number" if value is None else None
        return Standing(value, undefined, cell)

    def forget(self, cells: Iterable[Cell]) -> None:
        """Make failed runs, and runs with an undefined figure, start again from scratch."""
        for cell in cells:
            result = self.result(cell)
            task = self.suite.tasks.get(cell.texts)  # None: a part
            undefined = result is not None and task is not None and self.value(cell.texts, result, task.split) is None
            forget(cell.name, self.out, run=undefined)

    def missed(self) -> Failures:
        """Return failed runs without a result; of rejected choices, only those without RunError's exit code."""
        failures = Failures()
        for name, task in self.suite.tasks.items():
            every = (
                (model, choice, seed)
                for model in self.models
                for choice, seed in itertools.product(self.choices(name, model), self.seeds_of(name))
            )
            for model, choice, seed in every:
                _, problem, cell = self.standing(name, model, choice, seed, task.split)
                if cell is None or problem is None:
                    continue
                undefined = Failure(RunError.exit_code, problem, log_of(cell.name, self.out))
                failure = self.failures.get(cell.name, undefined)
                if self.chosen(name, model) in (None, choice) or failure.exit_code != RunError.exit_code:
                    failures[cell.name] = failure
        return failures

    def _standings(self, name: str, model: str, seed: int | None, chosen: Choice | None) -> list[Standing]:
        """Return the state of a seed's run; before a choice is made, the states of all runs that decide it."""
        if chosen is not None:
            return [self.standing(name, model, chosen, seed, None)]
        every = itertools.product(self.choices(name, model), self.choosing_seeds(name))
        return [self.standing(name, model, choice, own, None) for choice, own in every]

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a run."""
        return read_result(self.out / cell.name / RESULT)

    def value(self, name: str, result: Mapping[str, Any], split: str | None) -> float | None:
        """Return the task's metric on one split, or its mean over all; None if a split lacks it."""
        figures = result["figures"]
        splits = [split] if split is not None else list(figures)
        values = [figures.get(each, {}).get(self.metric(name)) for each in splits]
        return None if not values or any(each is None for each in values) else sum(values) / len(values)

    def chosen(self, name: str, model: str) -> Choice | None:
        """Return the choice with the best mean on the split that decides; None until every run that decides is done.

        A run without a figure is worse than any other: a choice with fewer of them wins before any mean is compared.
        """
        task, choices = self.suite.tasks[name], self.choices(name, model)
        if len(choices) == 1:
            return choices[0]
        means: dict[Choice, tuple[int, float]] = {}
        for choice in choices:
            seeds = self.choosing_seeds(name)
            standings = [self.standing(name, model, choice, seed, task.choose_on or task.split) for seed in seeds]
            if any(each.value is None and each.problem is None for each in standings):
                return None
            if values := [each.value for each in standings if each.value is not None]:
                means[choice] = len(values), sum(values) / len(values)
        return max(means, key=lambda choice: means[choice]) if means else None

    def best(self, name: str, model: str) -> Cell | None:
        """Return the run of the chosen values with the best seed, by the deciding split; None until one is finished."""
        task, chosen = self.suite.tasks[name], self.chosen(name, model)
        if chosen is None:
            return None
        decides = task.choose_on or task.split
        standings = [self.standing(name, model, chosen, seed, decides) for seed in self.seeds_of(name)]
        measured = [(each.value, each.cell) for each in standings if each.value is not None]
        return max(measured, key=lambda each: each[0], default=(None, None))[1]  # of ties the first

    def cells(self, names: Sequence[str], *, choosing: bool) -> Iterator[Cell]:
        """Yield the runs of these tasks that can start: with `choosing` those that decide choices, else all others.

        Ordered by seed, so that every cell of the table gets a figure early.
        """
        for index in range(len(self.seeds)):
            for name in names:
                seeds, deciding = self.seeds_of(name), self.choosing_seeds(name)
                if index >= len(seeds) or (seeds[index] in deciding) != choosing:
                    continue
                for model in self.models:
                    if self.unfit(name, model) is not None:
                        continue
                    chosen = [self.chosen(name, model)] if not choosing else self.choices(name, model)
                    for choice in chosen:
                        if choice is not None and (cell := self.cell(name, model, choice, seeds[index])) is not None:
                            yield cell

    def _what(self, task: SuiteTaskConfig) -> str:
        beside = self._home / task.argument
        is_yaml = (task.finetune or task.retrieval) and beside.suffix in (".yaml", ".yml")
        if is_yaml and not (beside.is_file() or Path(task.argument).is_file()):
            raise ConfigError(f"{task.argument}: no such file, neither here nor in {self._home}.")
        return str(beside) if Path(task.argument).suffix and beside.is_file() else task.argument

    def _words(self, name: str, choice: Choice) -> tuple[str, ...]:
        task = self.suite.tasks[name]
        own = self._overrides if task.finetune is not None else ()
        return (*(_word(key, value) for key, value in task.keys.items()), *own, *choice.words)

    def settings_of(self, name: str, source: str = "", choice: Choice = NO_CHOICE) -> dict[str, Any]:
        """Return all settings that determine a run's figures, without the seed."""
        task, words = self.suite.tasks[name], self._words(name, choice)
        if task.finetune is not None:
            config, run_overrides = self._read_task(self._what(task), words)
            return asked(config, source, run_overrides)
        if task.retrieval is not None:
            recipe, run_overrides = self._read_recipe(self._what(task), words)
            return {**asdict(recipe), **({"run": run_overrides} if run_overrides else {}), "model": source}
        return {**asdict(self.config_of(name, choice)), "beir": self._what(task), "model": source}


def choices_of(task: SuiteTaskConfig) -> list[Choice]:
    """Return all combinations of the values in `choices`; without any, one empty choice."""
    keys = list(task.choices)
    return [Choice(tuple(zip(keys, values, strict=True))) for values in itertools.product(*task.choices.values())]
