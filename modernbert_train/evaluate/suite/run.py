"""Run a suite, from a file or a command line: start the missing runs, and write the table after each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from modernbert_train.checkpoints.run_folder import held
from modernbert_train.config.tools.suite import SuiteConfig, SuiteTaskConfig
from modernbert_train.core.text import plural, printable
from modernbert_train.distributed.run_jobs import raise_failures
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.task import SEED, named_model
from modernbert_train.evaluate.retrieval.bm25 import BM25
from modernbert_train.evaluate.suite.adapters import ADAPTERS, gather_adapters
from modernbert_train.evaluate.suite.cells import (
    Failures,
    read_failures,
    refuse_changed,
    run_cells,
)
from modernbert_train.evaluate.suite.data import missing_data
from modernbert_train.evaluate.suite.efficiency import measure_all
from modernbert_train.evaluate.suite.formats import as_markdown
from modernbert_train.evaluate.suite.plan import Plan, choices_of, read_suite
from modernbert_train.evaluate.suite.submission import FOLDER, submit
from modernbert_train.evaluate.suite.table import FORMS, PICTURE, TABLE, make_table, write_suite
from modernbert_train.weights.names import look_up


def evaluate_suite(
    models: Sequence[str],
    name: str,
    out: Path,
    seeds: Sequence[int] | None,
    jobs: int | None,
    overrides: Sequence[str],
    *,
    dry_run: bool = False,
    retry: bool = False,
) -> None:
    """Fine-tune and measure models on the tasks of a suite, and write their table.

    Args:
        models: as `finetune` takes them, or bm25 for sets of BEIR.
        name: of the suite, or its file.
        out: folder of the runs' folders and of the table.
        seeds: override the suite's.
        jobs: runs at a time; None: as many as there are GPUs, or one.
        overrides: of every fine-tuning, such as compute.device=cpu.
        dry_run: print how many runs there would be and which data is missing, and end.
        retry: repeat runs that failed, or whose figure is undefined.

    Raises:
        ConfigError: the suite or a model is not there, or a result was made by other texts or weights.
        StoppedEarly: a signal came, and the runs have saved.
        RunError: some of them failed; all others are done.
    """
    suite, home = read_suite(name)
    plan = Plan(suite, home, list(dict.fromkeys(models)), seeds, out, overrides)
    for model in plan.models:
        if model != BM25:
            _check_encoder(named_model(model).source)
    print(printable(f"{name}: {describe(plan)}"), flush=True)
    if not dry_run:
        _run(plan, out, jobs, retry)
        return
    missing = missing_data(plan)
    head = f"{plural(len(missing), 'data set')} missing:" if missing else "no data is missing"
    print(printable("\n".join([head, *missing])))


def finetune_many(
    tasks: Sequence[str],
    models: Sequence[str],
    seeds: Sequence[int] | None,
    out: Path,
    jobs: int | None,
    overrides: Sequence[str],
    *,
    retry: bool = False,
) -> None:
    """Fine-tune every model on every task with every seed: a suite without a file. Arguments and errors are as above.

    Raises:
        ConfigError: two tasks have one name.
    """
    suite = SuiteConfig(tasks={Path(task).stem: SuiteTaskConfig(finetune=task) for task in tasks}, seeds=[SEED])
    if len(suite.tasks) < len(tasks):
        raise ConfigError(f"{' '.join(tasks)}: two of them have one name. Name each once, or rename a file.")
    for model in models:
        look_up(named_model(model).source)
    _run(Plan(suite, Path(), list(dict.fromkeys(models)), seeds, out, overrides), out, jobs, retry)


def _run(plan: Plan, out: Path, jobs: int | None, retry: bool) -> None:
    suite, parts = plan.suite, Failures()
    with held(out, "Wait for it, stop it, or name another folder."):
        stopped = False

        def draw() -> None:
            write_suite(out, make_table(plan, parts))

        for names in plan.levels:
            for choosing in (True, False):
                cells = list(plan.cells(names, choosing=choosing))
                if retry:
                    plan.forget(cells)
                plan.failures |= read_failures(cells, out)
                refuse_changed(cells, out)
                missing = [each for each in cells if plan.result(each) is None and each.name not in plan.failures]
                outcome = run_cells([] if stopped else missing, out, jobs, draw)
                plan.failures |= outcome.failed
                stopped |= outcome.stopped
        if suite.efficiency is not None and not stopped:
            measured = [
                (plan.labels[each], each) for each in plan.models if each != BM25 and not named_model(each).baseline
            ]
            outcome = measure_all(measured, suite.efficiency, out, dict(os.environ))
            parts, stopped = parts | outcome.failed, outcome.stopped
        if not stopped:
            outcome = submit(plan, out)
            parts, stopped = parts | outcome.failed, outcome.stopped
            gather_adapters(plan, out)
        draw()
    print(as_markdown(make_table(plan, parts)), end="")
    print(f"table: {', '.join(f'{out}/{name}' for name in (*FORMS, TABLE))}; picture: {out}/{PICTURE}")
    for folder, use in ((FOLDER, "to send to a test server"), (ADAPTERS, "adapters, a folder for each model")):
        if (out / folder).is_dir():
            print(f"{use}: {out}/{folder}")
    raise_failures(plan.missed() | parts, out, stopped=stopped)


def _check_encoder(source: str) -> None:
    described = look_up(source).described()
    if described is not None and described.order == "causal":
        raise ConfigError(
            f"{source}: a decoder, whose states do not see later tokens. Name an encoder, or turn it into one with "
            "the recipe that `modernbert-train init recipe adapt-decoder` prints."
        )


def describe(plan: Plan) -> str:
    """Return the numbers of tasks, models and runs, as text."""
    runs = 0
    for name, task in plan.suite.tasks.items():
        seeds, deciding = len(plan.seeds_of(name)), len(plan.choosing_seeds(name))
        runs += len(choices_of(task)) * deciding + (seeds - deciding)
    tasks, models = len(plan.suite.tasks), len(plan.models)
    speed = ", and how fast they read" * (plan.suite.efficiency is not None)
    return f"{plural(tasks, 'task')}, {plural(models, 'model')}, at most {plural(runs * models, 'run')}{speed}"
