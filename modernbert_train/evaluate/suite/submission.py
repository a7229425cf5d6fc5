"""A folder to send to a test server: predictions of the chosen run of each task for splits with hidden labels.

    python -m modernbert_train.evaluate.suite.submission RUN TASK FILE SPLIT... [KEY=VALUE...]

writes FILE, the predictions of a finished run; a suite does so of the seed that is best where its choices are made, and
writes OUT/submission/MODEL/NAME.tsv of `submit`, as GLUE's server takes it: `index`, `prediction`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import LabelledConfig
from modernbert_train.config.tools.suite import SubmitConfig
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.read_json import parse_json, read_json
from modernbert_train.core.text import file_name
from modernbert_train.distributed.run_jobs import Job
from modernbert_train.errors import StorageError, exit_code_of
from modernbert_train.evaluate.finetune.task import read_task
from modernbert_train.evaluate.suite.cells import LOGS, Outcome, run_parts
from modernbert_train.evaluate.suite.plan import Plan

FOLDER, PREDICTIONS = "submission", "submission.jsonl"


def submit(plan: Plan, out: Path) -> Outcome:
    """Write the files of each model's tasks whose runs are done; failures are by model and task."""
    jobs, whole = [], {}
    for model, label in plan.labels.items():
        for name, task in plan.suite.tasks.items():
            cell = plan.best(name, model) if task.submit else None
            if cell is not None:
                file, splits = out / cell.name / PREDICTIONS, [each.split for each in task.submit.values()]
                words = [sys.executable, "-m", __name__, str(out / cell.name), cell.task, str(file), *splits]
                job = Job(f"{label}, submission of {name}", [*words, *cell.overrides], out / LOGS / f"{cell.name}.log")
                whole[job.name] = file, out / FOLDER / file_name(label), task.submit
                jobs += [] if {*map(_name, splits)} <= {each["split"] for each in _read(file)} else [job]
    outcome = run_parts(jobs, os.environ)
    for file, folder, parts in (each for name, each in whole.items() if name not in outcome.failed):
        rows = _read(file)
        if not rows:
            continue  # a signal came first
        with os_errors_as(StorageError, f"{folder}: cannot be written", "Free some space; the same command resumes."):
            folder.mkdir(parents=True, exist_ok=True)
            for name, part in parts.items():
                own = [each for each in rows if each["split"] == _name(part.split)]
                write_whole(folder / f"{name}.tsv", as_tsv(own, part))
    return outcome


def _read(file: Path) -> list[dict[str, Any]]:
    """Return predictions; an empty list without the file."""
    return [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def as_tsv(rows: Sequence[Mapping[str, Any]], part: SubmitConfig) -> str:
    """Return a line for each text, in the split's order; a text without a prediction gets the first class, or 0."""
    first = next((next(iter(each["scores"])) for each in rows if each["scores"]), "")
    lines = ["index\tprediction"]
    for index, each in enumerate(rows):
        value = each["prediction"]
        if part.labels:
            value = part.labels.index(value) if value in part.labels else 0
        elif part.between:
            value = f"{min(max(value or 0.0, part.between[0]), part.between[1]):.3f}"
        lines.append(f"{index}\t{first if value is None else value}")
    return "\n".join(lines) + "\n"


def _name(split: str) -> str:
    return split.replace("/", "-")


def predict(run: Path, task_name: str, file: Path, splits: Sequence[str], overrides: Sequence[str]) -> None:
    """Write predictions of a run's best checkpoint for further splits of its task.

    Raises:
        DataError: they are not there.
    """
    from modernbert_train.evaluate.finetune.best import find_outcome
    from modernbert_train.evaluate.finetune.predictions import write_predictions
    from modernbert_train.evaluate.finetune.shards import ABOUT, TOKENIZER, prepare

    config, (task, _) = load_run([run / "config.yaml"]), read_task(task_name, overrides)
    made = read_json(run / "task" / ABOUT)["asked"]
    objective = cast(LabelledConfig, config.objective)
    labels = [] if objective.task_kind == "regression" else list(objective.labels)
    known = next(iter(task.validation.values()))  # small, while the training texts are many
    to_predict = replace(
        task, train=known, validation={}, predict={_name(each): each for each in splits}, labels=labels
    )
    shutil.rmtree(run / FOLDER, ignore_errors=True)  # of other splits, or of a process that was killed
    prepared = prepare(to_predict, run / "task" / TOKENIZER, made["max_tokens"], run / FOLDER)
    write_predictions(config, to_predict, prepared, find_outcome(config, task).checkpoint, file)
    shutil.rmtree(run / FOLDER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("task")
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="+")
    options = parser.parse_args()
    overrides = [word for word in options.words if "=" in word]
    rest = [word for word in options.words if word not in overrides]
    return exit_code_of(lambda: predict(options.run, options.task, options.file, rest, overrides))


if __name__ == "__main__":
    sys.exit(main())
