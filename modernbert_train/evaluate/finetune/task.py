"""Parse the task and the models that a command names, where a model may be a baseline; without torch.

A baseline is a prefix of the model's name, `frozen:runs/mine`, and goes through the same code as everything else: the
encoder is frozen and a linear head is trained on its states, or the weights are redrawn, or both.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.config.check import check
from modernbert_train.config.knob import may
from modernbert_train.config.load import load_run, load_typed
from modernbert_train.config.schema import VARIANTS, RunConfig
from modernbert_train.config.task_kinds import KINDS
from modernbert_train.config.tools.finetune import TASK_KEYS, TaskConfig
from modernbert_train.core.installed import YAMLS
from modernbert_train.core.text import file_name
from modernbert_train.errors import ConfigError, RunError
from modernbert_train.evaluate.finetune.kinds import task_problems
from modernbert_train.evaluate.finetune.read_texts import files_of, first_row
from modernbert_train.weights.names import look_up

SEED = 1618  # the first of those that ModernBERT was evaluated with
FROZEN, UNTRAINED = "frozen", "untrained"
_TASKS = YAMLS / "tasks"
_OF_MODEL = ("model", "objective", "phases", "evals")  # sections whose keys follow from the model and the texts
_LARGE = 1024  # width from which a task's section `large` applies
# sections that may change at a restart, since other code compares them, but that determine the figures
_DECIDES = ("phases", "evals", "stability")


class Named(NamedTuple):
    """A model as a command line names it.

    Attributes:
        source: see `weights.source.open_model`.
        baseline: FROZEN, UNTRAINED, both or none, in this order.
    """

    source: str
    baseline: tuple[str, ...]


def named_model(text: str) -> Named:
    """Split a name into the model and its baseline."""
    prefixes: list[str] = []
    while text.startswith((f"{FROZEN}:", f"{UNTRAINED}:")):
        first, _, text = text.partition(":")
        prefixes.append(first)
    return Named(text, tuple(each for each in (FROZEN, UNTRAINED) if each in prefixes))


def read_task(name: str, overrides: Sequence[str]) -> tuple[TaskConfig, list[str]]:
    """Read a task by its name or file, with its overrides applied; return also the overrides of the run.

    Raises:
        ConfigError: the task is unknown, or cannot be trained.
    """
    file = Path(name)
    if file.suffix not in (".yaml", ".yml"):
        file = _TASKS / f"{name}.yaml"
        if not file.is_file():
            if Path(name).exists():
                raise ConfigError(
                    f"{name}: is no task, which is a YAML file. If it holds labelled texts, set train={name} in one; "
                    "`init task sst2 > task.yaml` prints one."
                )
            tasks = ", ".join(sorted(path.stem for path in _TASKS.glob("*.yaml")))
            raise ConfigError(f"{name}: no such task. Known: {tasks or 'none here'}. Or name a YAML file of your own.")
    own = [each for each in overrides if _is_of_task(each.partition("=")[0])]
    task = load_typed(TaskConfig, [file], own)
    if problems := list(task_problems(task)):
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    return task, [each for each in overrides if each not in own]


def check_before(name: str, model: str, overrides: Sequence[str]) -> Path:
    """Refuse mistakes in a task's keys, its run's keys and its local files (first rows), before torch is loaded.

    Returns:
        The folder of the run.

    Raises:
        ConfigError: see `read_task` and `check_run`.
        DataError: a file is missing, lacks a column or has a broken first line.
    """
    task, run_overrides = read_task(name, overrides)
    config = check_run(as_run(name, model, run_overrides), [model])
    for split, path in files_of(task).items():
        first_row(split, path, task)
    return Path(config.folder)


def as_run(task: str, model: str, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a run with its name and seed, which they may set."""
    seed = next((each.partition("=")[2] for each in reversed(overrides) if each.startswith("seed=")), SEED)
    return [f"name={run_name(task, model, seed)}", f"seed={SEED}", *overrides]


def check_run(overrides: Sequence[str], models: Sequence[str] = ()) -> RunConfig:
    """Check the overrides of a recipe's run by the rules of every run, before its model and texts are opened.

    Args:
        overrides: of the run; keys of sections in _OF_MODEL are left to the run itself.
        models: that it begins with; their runs' plugins may add the optimizer.

    Returns:
        The quickstart's run with these overrides; its folder is the one of the recipe's run.

    Raises:
        ConfigError: names every wrong key and broken rule.
    """
    optimizer = next((word for word in reversed(overrides) if word.startswith("optim.name=")), "optim.name=adamw")
    for model in models if optimizer.partition("=")[2] not in VARIANTS["optim"] else ():
        with suppress(OSError, ValueError, RunError):  # found again when the model is opened
            look_up(named_model(model).source).described()  # imports its plugins
    kept = [word for word in overrides if word.partition("=")[0].split(".")[0] not in _OF_MODEL]
    config = load_run([YAMLS / "quickstart.yaml"], ["optim.name=adamw", *kept])
    check(config)
    return config


def _is_of_task(key: str) -> bool:
    # data= is the task's, data.train= the run's
    return key in TASK_KEYS or key.startswith(("validation.", "predict.", "large.", "frozen.", "lora."))


def as_trained(task: TaskConfig, named: Named, width: int) -> TaskConfig:
    """Return the task with a model's rates: section `large`, `frozen` or `lora`, if it applies."""
    if width >= _LARGE:
        rates: dict[str, Any] = {key: value for key, value in asdict(task.large).items() if value is not None}
        task = replace(task, **rates)
    if task.freeze or FROZEN in named.baseline:
        task = replace(task, freeze=True, lora=None, **asdict(task.frozen))
    elif task.lora is not None:
        task = replace(task, lr=task.lora.lr)
    return task


def run_name(task: str, model: str, seed: int | str) -> str:
    """Return the default name of a run: task, model and seed."""
    return file_name(f"{Path(task).stem}-{label_of(model)}", f"-{seed}")


def label_of(model: str) -> str:
    """Return a short name of a model: the baselines, then the name of its folder or run."""
    named = named_model(model)
    path = Path(os.path.abspath(named.source))  # `.` has no name
    own = path.parents[1].name if path.name.startswith("step-") and len(path.parents) > 1 else path.stem
    own = path.parent.name if own == "hf" else own
    return "-".join((*named.baseline, own))


def labels_of(models: Sequence[str]) -> dict[str, str]:
    """Return short names of models, unique also as file names: the whole path if two are equal."""
    labels = {model: label_of(model) for model in models}
    counts, taken = Counter(map(file_name, labels.values())), set[str]()
    for model, label in labels.items():
        if counts[file_name(label)] > 1:
            named = named_model(model)
            label = "-".join((*named.baseline, file_name(named.source.strip("./"))))
        names = itertools.chain([label], (f"{label}-{number}" for number in itertools.count(2)))
        labels[model] = next(each for each in names if file_name(each) not in taken)
        taken.add(file_name(labels[model]))
    return labels


def asked(task: TaskConfig, model: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return all settings of a command that determine its figures, without the seed; recorded in result.json.

    Args:
        task: as it was read.
        model: as it was named.
        overrides: of the run.
    """
    last = {key: value for key, _, value in (each.partition("=") for each in overrides)}
    kept = {key: value for key, value in sorted(last.items()) if key != "seed" and _decides(key)}
    # without keys of other kinds, so that results from before such keys existed still match
    other = {key for kind, row in KINDS.items() if kind != task.kind for key in row.keys}
    other |= {"lora"} if task.lora is None else set()
    own = {key: value for key, value in asdict(task).items() if key not in other}
    return json.loads(json.dumps({"task": own, "model": model, "keys": kept}))


def _decides(key: str) -> bool:
    return key.split(".")[0] in _DECIDES or not may("restart", RunConfig, key)
