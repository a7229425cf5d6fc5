"""Find missing data of a suite, and the command or place that brings it; without a network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.config.tools.retrieval import MTEB, EvaluateConfig, MeasureConfig, RetrievalConfig
from modernbert_train.core.files import anything_as, errors_to
from modernbert_train.core.installed import require
from modernbert_train.data.read.hub import is_saved, open_dataset
from modernbert_train.errors import ConfigError, DataError
from modernbert_train.evaluate.finetune.read_texts import file_of, splits_of
from modernbert_train.evaluate.retrieval.beir import beir_folder, fetching, find_judgements
from modernbert_train.evaluate.retrieval.rerank import RUN_ENDS
from modernbert_train.evaluate.retrieval.retrieval_recipe import pair_files
from modernbert_train.evaluate.retrieval.sets import find_task, parts_of, task_named
from modernbert_train.evaluate.suite.plan import Plan, choices_of

_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # names that a dataset of the hub may have


def missing_data(plan: Plan) -> list[str]:
    """Return a line for each missing file or set of a suite's tasks, with the tasks that need it."""
    tasks: dict[str, dict[str, None]] = {}
    for name, task in plan.suite.tasks.items():
        for choice in choices_of(task):
            config = plan.config_of(name, choice)
            if task.finetune is not None:
                texts = cast(TaskConfig, config)
                submitted = {f"submit.{file}": part.split for file, part in task.submit.items()}
                lines = _missing_texts(texts, splits_of(texts) | submitted)
            elif task.retrieval is not None:
                lines = _missing_of_recipe(cast(RetrievalConfig, config))
            else:
                lines = _missing_sets({"": task.argument}, cast(MeasureConfig, config))
            for line in lines:
                tasks.setdefault(line, {})[name] = None
    return [f"{', '.join(names)}: {line}" for line, names in tasks.items()]


def _missing_texts(task: TaskConfig, splits: dict[str, str]) -> list[str]:
    lines, data = list[str](), task.data
    split_names = {key: split.rpartition("/") for key, split in splits.items()}
    subsets = {key: part[0] or task.subset or "" for key, part in split_names.items()}
    if data is None or Path(data).is_dir():
        for key, split in splits.items():
            with errors_to(lines.append, DataError):
                if data is None or not is_saved(data):
                    file_of(key, split, task)
                else:
                    with anything_as(DataError, f"data={data}: cannot be read", "Write it again."):
                        open_dataset(data, subsets[key] or None, split_names[key][2], streaming=False)
    elif not _HUB.fullmatch(data):
        lines.append(f"data={data}: no such folder. Put it there, or name another in keys.")
    else:
        for subset in dict.fromkeys(subsets.values()):
            if not _is_cached(data, subset):
                words = ", ".join(repr(each) for each in (data, subset) if each)
                load = f'python -c "import datasets; datasets.load_dataset({words})"'
                name = "/".join(filter(None, (data, subset)))
                lines.append(f"data={name}: no such folder, nor a dataset on this machine. With a network: {load}")
    return lines


def _is_cached(data: str, subset: str = "") -> bool:
    """True if the library datasets keeps this dataset already."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    cached_name = data.replace("/", "___").replace("-", "").replace("_", "").lower()
    folders = (each for each in (cache.iterdir() if cache.is_dir() else ()) if each.is_dir())
    alike = [each for each in folders if each.name.replace("-", "").replace("_", "").lower() == cached_name]
    return any((each / subset).is_dir() for each in alike)


def _missing_of_recipe(recipe: RetrievalConfig) -> list[str]:
    lines = list[str]()
    for index, name in enumerate(recipe.train):
        with errors_to(lines.append, DataError):
            list(pair_files(index, name, recipe))
    return lines + _missing_sets({f"evaluate.{name}": each for name, each in recipe.evaluate.items()}, recipe)


def _missing_sets(sets: dict[str, str], config: EvaluateConfig) -> list[str]:
    lines = list[str]()
    for key, name in sets.items():
        with errors_to(lines.append, ConfigError, DataError):
            lines += _missing_set(name, config, key)
    if config.rerank is not None and not Path(config.rerank).exists() and Path(config.rerank).suffix in RUN_ENDS:
        lines.append(f"rerank={config.rerank}: no such file. Correct the path.")
    return lines


def _missing_set(name: str, config: EvaluateConfig, key: str) -> Iterator[str]:
    """Yield a line for a missing set. Raises ConfigError or DataError for a wrong name, or a folder without a file."""
    if (task := task_named(name, config)) is None:
        find_judgements(beir_folder(name, config.beir_folder), config.split, key)
        return
    require("retrieval", "mteb")
    datasets = [each.metadata for each in parts_of(find_task(task))]
    datasets = [each.name for each in datasets if not _is_cached(each.dataset["path"])]
    if datasets and name.startswith(MTEB):
        load = f"import mteb; [mteb.get_task(name).load_data() for name in {datasets}]"
        yield f'{name}: not on this machine. With a network: python -c "{load}"'
    elif datasets:
        yield f"{name}: not in {config.beir_folder}. {fetching(name.partition('/')[0], config.beir_folder)}"
