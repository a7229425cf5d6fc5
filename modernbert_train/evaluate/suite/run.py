"""Run a suite, of a file or of a command line: what is missing of its runs, and the table after each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from modernbert_train.config.tools.suite import SuiteConfig, SuiteTaskConfig
from modernbert_train.core.text import plural
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.task import SEED, named_model
from modernbert_train.evaluate.suite.cells import Cell, Outcome, held, refuse_changed, run_cells, tell
from modernbert_train.evaluate.suite.efficiency import measure_all
from modernbert_train.evaluate.suite.plan import Plan, choices_of, read_suite
from modernbert_train.evaluate.suite.submission import FOLDER, submit
from modernbert_train.evaluate.suite.table import PICTURE, as_markdown, make_table, write_suite
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.formats.config_json import CONFIG_JSON
from modernbert_train.weights.named_source import check_named


def evaluate_suite(
    models: Sequence[str],
    name: str,
    out: Path,
    seeds: Sequence[int] | None,
    jobs: int | None,
    overrides: Sequence[str],
    *,
    dry_run: bool = False,
) -> None:
    """Fine-tune and measure models on the tasks of a suite, and write their table.

    Args:
        models: as `finetune` takes them.
        name: of the suite, or its file.
        out: a folder for each run lies there, and the table.
        seeds: in place of the suite's.
        jobs: runs at a time; None: as many as there are GPUs, or one.
        overrides: of every fine-tuning, such as compute.device=cpu.
        dry_run: print how many runs there would be, and end.

    Raises:
        ConfigError: the suite or a model is not there, or a result was made by other texts or weights.
        StoppedEarly: a signal came, and the runs have saved.
        RunError: some of them failed; all others are done.
    """
    suite, home = read_suite(name)
    plan = Plan(suite, home, list(dict.fromkeys(models)), seeds, out, overrides)
    for model in plan.models:
        _check_encoder(named_model(model).source)
    print(f"{name}: {describe(plan)}", flush=True)
    if not dry_run:
        _run(plan, out, jobs)


def finetune_many(
    tasks: Sequence[str],
    models: Sequence[str],
    seeds: Sequence[int] | None,
    out: Path,
    jobs: int | None,
    overrides: Sequence[str],
) -> None:
    """Fine-tune every model on every task with every seed: a suite without a file. Arguments and errors are as above.

    Raises:
        ConfigError: two tasks have one name.
    """
    suite = SuiteConfig(tasks={Path(task).stem: SuiteTaskConfig(finetune=task) for task in tasks}, seeds=[SEED])
    if len(suite.tasks) < len(tasks):
        raise ConfigError(f"{' '.join(tasks)}: two of them have one name. Name each once, or rename a file.")
    for model in models:
        check_named(named_model(model).source)
    _run(Plan(suite, Path(), list(dict.fromkeys(models)), seeds, out, overrides), out, jobs)


def _run(plan: Plan, out: Path, jobs: int | None) -> None:
    suite, failed = plan.suite, dict[str, str]()
    with held(out):
        stopped = False
        lost: list[tuple[Cell, int, str]] = []

        def draw() -> None:
            write_suite(out, make_table(plan, failed))

        for names in plan.levels:
            for choosing in (True, False):
                cells = list(plan.cells(names, choosing=choosing))
                refuse_changed(cells, out)
                missing = [] if stopped else [cell for cell in cells if plan.result(cell) is None]
                outcome = run_cells(missing, out, jobs, draw)
                lost += outcome.failed
                failed |= {cell.name: f"failed with exit code {code}: {said}" for cell, code, said in outcome.failed}
                stopped |= outcome.stopped
        if suite.efficiency is not None and not stopped:
            measured = [(plan.labels[each], each) for each in plan.models if not named_model(each).baseline]
            failed |= measure_all(measured, suite.efficiency, out, dict(os.environ))
        if not stopped:
            failed |= submit(plan, out)
        draw()
    print(as_markdown(make_table(plan, failed)))
    print(f"table: {out}/table.md, {out}/table.json; picture: {out}/{PICTURE}")
    if (out / FOLDER).is_dir():
        print(f"to send to a test server: {out}/{FOLDER}")
    tell(Outcome(failed=lost, stopped=stopped), out)


def _check_encoder(source: str) -> None:
    check_named(source)
    if (Path(source) / CONFIG_JSON).is_file() and read_folder(Path(source)).order == "causal":
        raise ConfigError(
            f"{source}: a decoder, whose states know nothing of the words after. Name an encoder, or make one of it as "
            "yamls/recipes/adapt-decoder.yaml does."
        )


def describe(plan: Plan) -> str:
    """How much there is to do."""
    runs = 0
    for name, task in plan.suite.tasks.items():
        seeds, deciding = len(plan.seeds_of(name)), len(plan.choosing_seeds(name))
        runs += len(choices_of(task)) * deciding + (seeds - deciding)
    tasks, models = len(plan.suite.tasks), len(plan.models)
    speed = ", and how fast they read" * (plan.suite.efficiency is not None)
    return f"{plural(tasks, 'task')}, {plural(models, 'model')}, at most {plural(runs * models, 'run')}{speed}"
