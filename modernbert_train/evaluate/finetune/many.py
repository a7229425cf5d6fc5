"""Many fine-tunings by one command: every task with every model and seed, each a process of its own; and their table.

Nothing is remembered but what the runs themselves leave. A run with a result is done, if it was asked for the same; one
that was cut goes on from its checkpoint; one that failed is tried again by the same command. So this process can be
killed at any moment.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.run_folder import take_lock
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.installed import PACKAGE
from modernbert_train.core.read_json import read_json
from modernbert_train.core.text import duration, plural
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.distributed.gpus import count_gpus
from modernbert_train.distributed.many import Job, environments, last_words, run_all
from modernbert_train.errors import ConfigError, DataError, RunError, StoppedEarly, StorageError
from modernbert_train.evaluate.finetune.result import RESULT
from modernbert_train.evaluate.finetune.table import as_markdown, make_table, read_result, write_table
from modernbert_train.evaluate.finetune.task import (
    SEED,
    asked,
    label_of,
    labels_of,
    named_model,
    newest_checkpoint,
    read_task,
    run_name,
)
from modernbert_train.report.many import write_table_page
from modernbert_train.weights.named_source import check_named

LOGS = "logs"
_OWN = ("name", "runs_folder", "seed")  # that each run has its own of


@dataclass(frozen=True)
class Cell:
    """One run of many.

    Attributes:
        task, model: as they are named.
        seed: None where nothing is drawn.
        name: of the run.
        overrides: its own.
        verb: that runs it.
        texts: runs with the same name here read the same texts; empty: those of one task do.
    """

    task: str
    model: str
    seed: int | None
    name: str
    overrides: tuple[str, ...] = ()
    verb: tuple[str, ...] = ("finetune",)
    texts: str = ""


@dataclass
class Outcome:
    """What became of many runs.

    Attributes:
        failed: those that did not end well: cell, exit code, the last that it said.
        stopped: whether a signal came, here or to one of them.
    """

    failed: list[tuple[Cell, int, str]] = field(default_factory=list)
    stopped: bool = False


def finetune_many(
    tasks: Sequence[str],
    models: Sequence[str],
    seeds: Sequence[int] | None,
    out: Path,
    jobs: int | None,
    overrides: Sequence[str],
) -> None:
    """Fine-tune every model on every task with every seed, and write their table.

    Args:
        tasks, models, overrides: see `finetune`.
        seeds: None: the first that is usual.
        out: a folder for each run lies there, and the table.
        jobs: runs at a time; None: as many as there are GPUs, or one.

    Raises:
        ConfigError: it cannot be, or what is there was made by other settings.
        DataError, StorageError: there is no such model.
        StoppedEarly: a signal came, and the runs have saved.
        RunError: some of them failed; all others are done.
    """
    cells = plan_cells(tasks, models, seeds or [SEED])
    for model in models:
        check_named(named_model(model).source)
    with held(out):
        refuse_other_settings(cells, out, overrides)
        done = [cell for cell in cells if "asked" in (read_result(out / cell.name / RESULT) or {})]
        if done:
            print(f"{out}: {plural(len(done), 'run')} of {len(cells)} done before")

        def draw() -> None:
            write_table(out, make_table(out, models, tasks))
            write_table_page(out)

        outcome = run_cells([cell for cell in cells if cell not in done], out, jobs, overrides, draw)
        draw()
    print(as_markdown(make_table(out, models, tasks)))
    print(f"table: {out}/table.md, {out}/table.json; page: {out}/report.html")
    tell(outcome, out)


def plan_cells(tasks: Sequence[str], models: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Every task with every model and seed; one seed after the other, so that the table is soon full.

    Raises:
        ConfigError: two of them would have the same folder.
    """
    for what, words in (("task", tasks), ("--model", models), ("--seeds", seeds)):
        if twice := [word for word, count in Counter(words).items() if count > 1]:
            raise ConfigError(f"{what} {twice[0]}: named twice. Name it once.")
    labels = labels_of(models)
    cells = []
    for seed in seeds:
        for task in tasks:
            for model in models:
                name = run_name(task, model, seed)
                if labels[model] != label_of(model):
                    name = run_name(task, labels[model], seed)
                cells.append(Cell(task, model, seed, name))
    names = Counter(cell.name for cell in cells)
    if twice := [cell for cell in cells if names[cell.name] > 1]:
        first, second = twice[0], next(each for each in twice[1:] if each.name == twice[0].name)
        raise ConfigError(
            f"{first.task} of {first.model} and {second.task} of {second.model}: both would be called {first.name}. "
            "Rename one of the files or folders, or run them with another --out."
        )
    return cells


def refuse_other_settings(cells: Sequence[Cell], out: Path, overrides: Sequence[str]) -> None:
    """Refuse a command that asks for other settings than those of results that are there; a task that is none, too.

    Raises:
        ConfigError: names each run and what differs.
    """
    for each in overrides:
        if (key := each.partition("=")[0]) in _OWN:
            raise ConfigError(f"{each}: each of several runs has its own {key}. Use --out and --seeds.")
    wrong = []
    for cell in cells:
        if cell.verb != Cell.verb:
            continue  # retrieval compares itself
        task, rest = read_task(cell.task, [*overrides, *cell.overrides])
        result = read_result(out / cell.name / RESULT)
        if result is not None and (other := _differences(result, asked(task, cell.model, rest), out / cell.name)):
            wrong.append(f"{out / cell.name}: {'; '.join(other)}")
    if wrong:
        raise ConfigError(
            "results that were made by other settings:\n  "
            + "\n  ".join(wrong)
            + "\nRestore the settings, name another folder, or remove these."
        )


def _differences(result: dict[str, Any], wanted: dict[str, Any], folder: Path) -> list[str]:
    """What a result was made by, and what is asked for now, where they differ."""
    if not isinstance(made := result.get("asked"), dict):
        return []  # of an earlier version: the run is started, and compares itself
    before, now = (_flat(each) for each in (made, wanted))
    found = [
        f"{key}: {before.get(key)} there, {now.get(key)} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    newest = newest_checkpoint(named_model(wanted["model"]).source)
    first = str(result.get("weights", ""))
    if newest is not None and first != "scratch" and f"={newest};" not in f"{first};":
        found.append(f"its first weights are {first.split(';')[0]}, and {newest} is there now")
    return found + list(_changed_files(folder / "task" / "task.json"))


def _changed_files(about: Path) -> Iterator[str]:
    """Texts of a result that are others by now."""
    try:
        files = read_json(about)["asked"]["files"]
        for name, file in files.items():
            if file_sha256(Path(file["file"])) != file["sha256"]:
                yield f"{name}: {file['file']} has changed since"
    except (OSError, ValueError, KeyError, TypeError):
        return  # what is not there any more cannot be compared


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Values by their keys, without the sections of `asked`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        own = "" if not path and key in ("task", "keys") else f"{path}{key}"
        found |= _flat(value, f"{own}." if own else "") if isinstance(value, dict) else {own: value}
    return found


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    jobs: int | None,
    overrides: Sequence[str],
    finished: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run fine-tunings, each a process of its own.

    Args:
        cells: those to run.
        out: folder of their folders.
        jobs: at a time; see `finetune_many`.
        overrides: of all.
        finished: called after each that has a result.
        meanwhile: called every second, for what is quick.
    """
    outcome, by_name, begun, total = Outcome(), {cell.name: cell for cell in cells}, time.monotonic(), len(cells)
    on_cpu = any(each == "compute.device=cpu" for each in overrides)
    gpus = 0 if on_cpu else count_gpus()
    places = min(jobs or gpus or 1, max(1, total))
    # so that a process finds this very package, wherever it starts
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    own = environments(places, environment, gpus, os.cpu_count() or 1)
    over = 0

    def ended(job: Job, code: int) -> None:
        nonlocal over
        over += 1
        cell, took = by_name[job.name], duration(time.monotonic() - begun)
        result = read_result(out / cell.name / RESULT)
        if code == 0 and result is not None:
            print(f"[{over} of {total}, {took}] {cell.name}: {_in_words(result)}", flush=True)
            finished()
        elif code == StoppedEarly.exit_code:
            outcome.stopped = True
        else:
            outcome.failed.append((cell, code, last_words(job.log)))
            print(f"[{over} of {total}, {took}] {cell.name}: failed, exit code {code}; {job.log}", flush=True)

    def without_data(cell: Cell) -> bool:
        """Whether the same texts were missing or broken before: then they are for every seed."""
        broken = [other for other, code, _ in outcome.failed if code == DataError.exit_code]
        return (cell.texts or cell.task, cell.model) in {(other.texts or other.task, other.model) for other in broken}

    jobs_of = (
        Job(cell.name, _command(cell, out, overrides), out / LOGS / f"{cell.name}.log")
        for cell in cells
        if not without_data(cell)
    )
    stopped = run_all(jobs_of, own, ended, lambda job: meanwhile())
    outcome.stopped |= stopped
    return outcome


def _command(cell: Cell, out: Path, overrides: Sequence[str]) -> list[str]:
    own = [f"runs_folder={out}", f"name={cell.name}"] + ([] if cell.seed is None else [f"seed={cell.seed}"])
    words = [*cell.verb, cell.task, "--model", cell.model, *overrides, *cell.overrides, *own]
    return [sys.executable, "-m", "modernbert_train", *words]


def _in_words(result: dict[str, Any]) -> str:
    columns = [(split, metric) for split, figures in result["figures"].items() for metric in figures]
    wanted = result["settings"].get("metrics")
    shown = [
        f"{split} {metric} {result['figures'][split][metric]}"
        if result["figures"][split][metric] is None
        else f"{split} {metric} {result['figures'][split][metric]:.4f}"
        for split, metric in columns
        if not metric.startswith(("baseline/", "num_", "loss")) and (not wanted or metric in wanted)
    ]
    return ", ".join(shown)


def tell(outcome: Outcome, out: Path) -> None:
    """Say what failed, with the place of its log, and raise what the program ends with: of a stop 75, whatever else.

    Raises:
        StoppedEarly, RunError: see `finetune_many`.
    """
    lines = [
        f"  {cell.name}: exit code {code}; {out / LOGS / cell.name}.log\n    {said}"
        for cell, code, said in outcome.failed
    ]
    failed = ""
    if lines:
        head = f"{plural(len(lines), 'run')} failed; the same command tries again, and keeps the others:"
        failed = "\n".join([head, *lines])
    if outcome.stopped:
        raise StoppedEarly("\n".join(filter(None, [f"{out}: stopped. The same command resumes.", failed])))
    if failed:
        failure, code = RunError(failed), outcome.failed[0][1]
        failure.exit_code = code if code > 0 else RunError.exit_code
        raise failure


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock of a folder: one command at a time works there.

    Raises:
        ConfigError: another has it.
        StorageError: it cannot be written.
    """
    with os_errors_as(StorageError, f"{folder}: cannot be written", "Fix the disk, or name another."):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder, "Wait for it, stop it, or name another folder.")
    with lock:
        yield
