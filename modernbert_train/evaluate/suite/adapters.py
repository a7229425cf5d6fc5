"""A folder of adapters for each model of a table, OUT/adapters/MODEL/TASK, which `PeftModel.load_adapter` reads."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from modernbert_train.checkpoints.results import run_of
from modernbert_train.core.files import os_errors_as, whole_folder
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import file_name, printable
from modernbert_train.errors import StorageError
from modernbert_train.evaluate.finetune.result import ADAPTER
from modernbert_train.evaluate.finetune.task import named_model
from modernbert_train.evaluate.suite.plan import Plan
from modernbert_train.weights.formats.config_json import ADAPTER_JSON

ADAPTERS = "adapters"


def gather_adapters(plan: Plan, out: Path) -> None:
    """Copy the adapter of each task's best seed; adapters of another base than the model are left out, with a line.

    Raises:
        StorageError: an adapter is damaged, or the disk refuses it.
    """
    remedy, damage = "Free some space, or remove a damaged run; the same command resumes.", (ValueError, KeyError)
    for (model, label), name in itertools.product(plan.labels.items(), plan.suite.tasks):
        cell, base = plan.best(name, model), named_model(model).source
        made = None if cell is None else out / cell.name / ADAPTER
        if made is None or not (made / ADAPTER_JSON).is_file():
            continue
        own = out / ADAPTERS / file_name(label) / file_name(name)
        with os_errors_as(StorageError, f"{made}: cannot be copied to {own}", remedy, *damage):
            other, run = read_json(made / ADAPTER_JSON)["base_model_name_or_path"], run_of(Path(base)) or Path(base)
            if other == base or Path(other).parent == run:  # itself, or an export of it; see `base_of`
                with whole_folder(own) as new:
                    shutil.copytree(made, new, dirs_exist_ok=True)
            else:
                print(printable(f"{name}: its adapter is of {other} and not of {base}; it stays in {made}"), flush=True)
