"""Files to send to a test server: predictions of the chosen run of each task for splits with hidden labels.

    python -m modernbert_train.evaluate.suite.submission TASK --model RUN submit=JSON ... runs_folder=OUT name=X

writes the predictions of a finished run; a suite does so for the seed that is best on the split that decides. The
result has the text of each file of `submit`, as GLUE's server takes it: `index`, `prediction`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from modernbert_train.config.load import load_run
from modernbert_train.config.schema import LabelledConfig
from modernbert_train.config.tools.suite import SubmitConfig
from modernbert_train.core.read_json import parse_json, read_json
from modernbert_train.errors import ConfigError, exit_code_of
from modernbert_train.evaluate.finetune.kinds import Kind, kind_of
from modernbert_train.evaluate.finetune.result import PREDICTIONS, RESULT, write_figures
from modernbert_train.evaluate.finetune.task import read_task
from modernbert_train.evaluate.suite.cells import Parts, parse_cell_command
from modernbert_train.evaluate.suite.plan import Plan


def submissions(plan: Plan) -> Parts:
    """Return the predictions of each model's tasks, by their best runs so far."""
    cells = Parts()
    for model, label in plan.labels.items():
        for name, task in plan.suite.tasks.items():
            cell = plan.best(name, model) if task.submit else None
            if cell is not None:
                asked = json.dumps({file: asdict(part) for file, part in task.submit.items()})
                words = [f"submit={asked}", *cell.overrides]
                run = str(plan.out / cell.name)
                cells[label, f"submission of {name}"] = plan.part(
                    f"submission-{name}", model, cell.task, run, words, __name__
                )
    return cells


def as_tsv(predictions: Sequence[Any], part: SubmitConfig, kind: Kind, classes: Sequence[str]) -> str:
    """Return a line for each text, in the split's order.

    Raises:
        ConfigError: the file does not fit the classes.
    """
    if problems := list(kind.submit_problems(part, classes)):
        raise ConfigError("\n".join(f"submit: {problem}" for problem in problems))
    lines = [f"{index}\t{kind.submitted(each, part, classes)}" for index, each in enumerate(predictions)]
    return "\n".join(["index\tprediction", *lines]) + "\n"


def predict(task_name: str, run: Path, words: Sequence[str], out: Path) -> None:
    """Write predictions of a run's best checkpoint for further splits of its task, and its result: the files' text.

    Raises:
        DataError: they are not there.
        ConfigError: see `as_tsv`.
    """
    from modernbert_train.evaluate.finetune.best import find_outcome
    from modernbert_train.evaluate.finetune.predictions import write_predictions
    from modernbert_train.evaluate.finetune.shards import ABOUT, TOKENIZER, prepare

    first, *overrides = words
    files = {name: SubmitConfig(**part) for name, part in parse_json(first.removeprefix("submit=")).items()}
    config, (task, _) = load_run([run / "config.yaml"]), read_task(task_name, overrides)
    requested = read_json(run / "task" / ABOUT)["asked"]
    objective = cast(LabelledConfig, config.objective)
    labels = list(objective.labels)
    labelled = next(iter(task.validation.values()))  # small, while the training texts are many
    splits = {each.split.replace("/", "-"): each.split for each in files.values()}
    to_predict, texts = replace(task, train=labelled, validation={}, predict=splits, labels=labels), out / "task"
    shutil.rmtree(texts, ignore_errors=True)  # left by a killed process
    prepared = prepare(to_predict, run / "task" / TOKENIZER, requested["max_tokens"], texts)
    write_predictions(config, to_predict, prepared, find_outcome(config, task).checkpoint, out / PREDICTIONS)
    write_submission(files, kind_of(task.kind), labels, task_name, run, out)
    for each in texts.iterdir():
        if each.is_dir():  # else it says whether the texts have changed since
            shutil.rmtree(each)


def write_submission(
    files: Mapping[str, SubmitConfig], kind: Kind, classes: Sequence[str], task: str, run: Path, out: Path
) -> None:
    """Write the result of predictions that are there; see `as_tsv`."""
    lines = [parse_json(line) for line in (out / PREDICTIONS).read_text(encoding="utf-8").splitlines()]
    submission = {
        name: as_tsv(
            [line["prediction"] for line in lines if line["split"] == part.split.replace("/", "-")],
            part,
            kind,
            classes,
        )
        for name, part in files.items()
    }
    write_figures(
        out / RESULT,
        task=f"submission of {Path(task).stem}",
        source=str(run),
        seed=None,
        run=out.name,
        figures={},
        counts={},
        settings={"submit": {name: asdict(part) for name, part in files.items()}},
        files=submission,
    )


def main() -> None:
    task, run, words, out = parse_cell_command()
    predict(task, Path(run), words, out)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
