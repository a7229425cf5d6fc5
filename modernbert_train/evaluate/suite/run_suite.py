"""Run a suite, from a file or a command line: start the missing runs, and write the table after each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modernbert_train.checkpoints.run_folder import held
from modernbert_train.config.tools.suite import SuiteConfig, SuiteTaskConfig
from modernbert_train.core.text import plural, printable
from modernbert_train.distributed.run_jobs import raise_failures
from modernbert_train.errors import ConfigError
from modernbert_train.evaluate.finetune.task import SEED, named_model
from modernbert_train.evaluate.retrieval.bm25 import BM25
from modernbert_train.evaluate.suite.cells import Cell, Failures, changed_since, forget, read_failures, run_cells
from modernbert_train.evaluate.suite.collect_files import FOLDERS, gather
from modernbert_train.evaluate.suite.efficiency import speeds
from modernbert_train.evaluate.suite.formats import Table, as_markdown
from modernbert_train.evaluate.suite.missing_data import missing_data
from modernbert_train.evaluate.suite.plan import Plan, choices_of, read_suite
from modernbert_train.evaluate.suite.submission import submissions
from modernbert_train.evaluate.suite.suite_table import FORMS, PICTURE, TABLE, make_table, write_suite
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
    head = f"{plural(len(missing), 'data set')} missing or unfit:" if missing else "no data is missing"
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
        ConfigError: two tasks have the same name.
    """
    suite = SuiteConfig(tasks={Path(task).stem: SuiteTaskConfig(finetune=task) for task in tasks}, seeds=[SEED])
    if len(suite.tasks) < len(tasks):
        raise ConfigError(f"{' '.join(tasks)}: two of them have the same name. Name each once, or rename a file.")
    for model in models:
        look_up(named_model(model).source)
    _run(Plan(suite, Path(), list(dict.fromkeys(models)), seeds, out, overrides), out, jobs, retry)


def _run(plan: Plan, out: Path, jobs: int | None, retry: bool) -> None:
    stopped, left_out = False, list[str]()

    def table() -> Table:
        return make_table(plan, lost_parts(plan), left_out)

    def draw() -> None:
        write_suite(out, table())

    def start(cells: Sequence[Cell], jobs: int | None, *, parts: bool) -> None:
        nonlocal stopped
        if retry:
            plan.forget(cells)
        changed = list(changed_since(cells, out, plan.weights_now))
        if not parts:
            _refuse(changed, out)
        for cell, _ in changed:
            forget(cell.name, out, run=True)
        plan.failures |= read_failures(cells, out)
        missing = [each for each in cells if plan.result(each) is None and each.name not in plan.failures]
        stopped = stopped or run_cells(missing, out, jobs, draw, plan.failures)

    with held(out, "Wait for it, stop it, or name another folder."):
        for names in plan.levels:
            for choosing in (True, False):
                start(list(plan.cells(names, choosing=choosing)), jobs, parts=False)
        start([*speeds(plan).values()], 1, parts=True)
        start([*submissions(plan).values()], jobs, parts=True)
        left_out = gather(plan)
        draw()
    print(as_markdown(table()), end="")
    print(f"table: {', '.join(f'{out}/{name}' for name in (*FORMS, TABLE))}; picture: {out}/{PICTURE}")
    for folder, use in FOLDERS.items():
        if any((out / folder).glob("*/*")):
            print(f"{use}: {out}/{folder}")
    raise_failures(plan.missed() | lost_parts(plan), out, stopped=stopped)


def lost_parts(plan: Plan) -> Failures:
    """Return the failed measurements of speed and submissions, by model and what failed."""
    cells = {**speeds(plan), **submissions(plan)}
    return {
        ", ".join(key): plan.failures[cell.name]
        for key, cell in cells.items()
        if cell.name in plan.failures and plan.result(cell) is None
    }


def _refuse(changed: Sequence[tuple[Cell, str]], out: Path) -> None:
    """Refuse results of other texts or weights: figures that took hours are not replaced unasked.

    Raises:
        ConfigError: names each run and what differs.
    """
    if wrong := [f"{out / cell.name}: {words}" for cell, words in changed]:
        raise ConfigError(
            "results of other texts or weights:\n  "
            + "\n  ".join(wrong)
            + "\nRestore them, name another folder, or remove these."
        )


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
