"""Files gathered from the runs of a table, by model: OUT/adapters/MODEL/TASK, which `PeftModel.load_adapter` reads, and
OUT/submission/MODEL/NAME.tsv for a test server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modernbert_train.checkpoints.evaluations import run_of
from modernbert_train.core.files import os_errors_as, whole_folder, write_whole
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import file_name
from modernbert_train.errors import StorageError
from modernbert_train.evaluate.finetune.result import ADAPTER
from modernbert_train.evaluate.finetune.task import named_model
from modernbert_train.evaluate.suite.plan import Plan
from modernbert_train.evaluate.suite.submission import submissions
from modernbert_train.weights.formats.config_json import ADAPTER_JSON

FOLDERS = {"submission": "to send to a test server", "adapters": "adapters, a folder for each model"}


def gather(plan: Plan) -> list[str]:
    """Gather the files of each task's best seed, and remove files of earlier runs.

    Returns:
        A line for each adapter that is left out.

    Raises:
        StorageError: an adapter is damaged, or the disk refuses it.
    """
    submitted, left_out = submissions(plan), list[str]()
    for model, label in plan.labels.items():
        submission, adapters = (_own_folder(plan, model, kind) for kind in FOLDERS)
        with submission as folder:
            for name, task in plan.suite.tasks.items():
                part = submitted.get((label, f"submission of {name}"))
                result = None if part is None else plan.result(part)
                for file in task.submit:
                    _write(folder / f"{file}.tsv", None if result is None else result["files"][file])
        with adapters as folder:
            for name in plan.suite.tasks:
                left_out += _copy_adapter(plan, model, name, folder / file_name(name))
    return left_out


@contextmanager
def _own_folder(plan: Plan, model: str, kind: str) -> Iterator[Path]:
    """Context with a model's folder, emptied if it was of another model with this label, or of other weights."""
    folder = plan.out / kind / file_name(plan.labels[model])
    record = folder.with_name(f".{folder.name}.json")
    now = {"model": model, "weights": plan.weights_now(named_model(model).source)}
    remedy = "Free some space, or remove a damaged run; the same command resumes."
    with os_errors_as(StorageError, f"{folder}: cannot be written", remedy, ValueError, KeyError):
        recorded = None
        with suppress(OSError, ValueError):
            recorded = read_json(record)
        if recorded != now:
            shutil.rmtree(folder, ignore_errors=True)
        yield folder
        if folder.is_dir():
            write_whole(record, json.dumps(now) + "\n")


def _write(file: Path, text: str | None) -> None:
    if text is None:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)


def _copy_adapter(plan: Plan, model: str, name: str, own: Path) -> Iterator[str]:
    """Copy the adapter of a task; one of another base than the model is left out: yield a line about it."""
    cell, base = plan.best(name, model), named_model(model).source
    adapter = None if cell is None else plan.out / cell.name / ADAPTER
    if adapter is not None and (adapter / ADAPTER_JSON).is_file():
        other, run = read_json(adapter / ADAPTER_JSON)["base_model_name_or_path"], run_of(Path(base)) or Path(base)
        if other == base or Path(other).parent == run:  # itself, or an export of it; see `base_of`
            with whole_folder(own) as new:
                shutil.copytree(adapter, new, dirs_exist_ok=True)
            return
        yield f"{name}: its adapter is of {other} and not of {base}; it stays in {adapter}"
    shutil.rmtree(own, ignore_errors=True)
