"""Find missing data of a suite, and the commands that fetch it; without torch or a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.errors import DataError
from modernbert_train.evaluate.finetune.read import files_of
from modernbert_train.evaluate.retrieval.beir import BEIR, fetching
from modernbert_train.evaluate.suite.plan import Plan


def missing_data(plan: Plan) -> list[str]:
    """Return a line for each missing file or set of a suite's tasks; mteb's own sets are not checked."""
    tasks: dict[str, list[str]] = {}
    for name in plan.suite.tasks:
        for line in (*_of_files(plan, name), *_of_sets(plan, name)):
            tasks.setdefault(line, []).append(name)
    return [f"{', '.join(names)}: {line}" for line, names in tasks.items()]


def _of_files(plan: Plan, name: str) -> Iterator[str]:
    task = plan.finetuned(name)
    if task is None:
        return
    if task.data is None or Path(task.data).is_dir():
        try:
            files_of(task)
        except DataError as error:
            yield str(error)
        return
    subsets = dict.fromkeys(
        each.rpartition("/")[0] or task.subset or "" for each in (task.train, *task.validation.values())
    )
    for subset in subsets:
        if not _is_cached(task, subset):
            words = ", ".join(repr(each) for each in (task.data, subset) if each)
            load = f'python -c "import datasets; datasets.load_dataset({words})"'
            yield f"data={'/'.join(filter(None, (task.data, subset)))}: not on this machine. With a network: {load}"


def _is_cached(task: TaskConfig, subset: str) -> bool:
    """True if the library datasets keeps this dataset already."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    wanted = str(task.data).replace("/", "___").replace("-", "").replace("_", "").lower()
    found = (each for each in (cache.iterdir() if cache.is_dir() else ()) if each.is_dir())
    alike = [each for each in found if each.name.replace("-", "").replace("_", "").lower() == wanted]
    return any((each / subset).is_dir() for each in alike)


def _of_sets(plan: Plan, name: str) -> Iterator[str]:
    task = plan.suite.tasks[name]
    if task.finetune is not None or task.mteb is not None:
        return
    settings = plan.asked_of(name)
    for file in settings.get("train") or ():
        if not Path(file).exists():
            yield f"train={file}: no such file. Put it there, or name another in keys."
    home = Path(str(settings.get("beir_folder", "data/beir")))
    for each in [task.beir] if task.beir is not None else list((settings.get("evaluate") or {}).values()):
        known = (*Path(str(each)).parts, "")[0]
        if Path(str(each)).exists() or (known in BEIR and (home / known).exists()):
            continue
        if known in BEIR:
            yield f"{each}: not in {home}. {fetching(known, str(home))}"
        else:
            yield f"{each}: no such folder. Put it there, or name another."
