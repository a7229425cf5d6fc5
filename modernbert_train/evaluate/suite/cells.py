"""Start many runs with one command, each in a separate process.

A run with a result is done, and an interrupted one resumes from its checkpoint. A failed run leaves a file with its
exit code and message in OUT/failed, and is repeated only on request. This process keeps no other state, so it can be
killed at any moment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.manifest import newest_step
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.installed import path_of_children
from modernbert_train.core.read_json import is_count, read_json
from modernbert_train.core.text import duration, file_name
from modernbert_train.data.dataset_card import file_sha256
from modernbert_train.distributed.run_jobs import (
    Failure,
    Failures,
    Job,
    environments,
    last_words,
    newest_line,
    run_all,
)
from modernbert_train.distributed.visible_gpus import count_gpus
from modernbert_train.errors import DataError, StoppedEarly, StorageError
from modernbert_train.evaluate.finetune.result import DATA_FILES, RESULT, read_result
from modernbert_train.evaluate.finetune.shards import DECIDES, DECIDES_IF_SET
from modernbert_train.evaluate.finetune.task import UNTRAINED, named_model
from modernbert_train.weights.names import is_checkpoint

LOGS, FAILED = "logs", "failed"
_TEXT_KEYS = {*DECIDES, *DECIDES_IF_SET, "evaluate", "beir_folder"}
_LINE_SECONDS = 60  # between two lines about a running job


@dataclass(frozen=True)
class Cell:
    """One run of many.

    Attributes:
        task, model: as they are named.
        seed: None where nothing is drawn.
        name: of the run.
        overrides: of this run.
        verb: the one that runs it.
        texts: runs with the same name here read the same texts; empty: runs of one task do.
        module: the program that has the verb.
    """

    task: str
    model: str
    seed: int | None
    name: str
    overrides: tuple[str, ...] = ()
    verb: tuple[str, ...] = ("finetune",)
    texts: str = ""
    module: str = "modernbert_train"


Parts = dict[tuple[str, str], Cell]  # speeds and submissions, by the model's label and their name


def read_failures(cells: Sequence[Cell], out: Path) -> Failures:
    """Return the failures of earlier commands among these runs; unreadable records are ignored."""
    failures = {}
    for cell in cells:
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = read_json(out / FAILED / f"{cell.name}.json")
            if is_count(abs(record["exit_code"])):
                failures[cell.name] = Failure(record["exit_code"], str(record["message"]), log_of(record["run"], out))
    return failures


def forget(name: str, out: Path, *, run: bool = False) -> None:
    """Remove the record of a failure, so that the run is repeated.

    Args:
        name: of the run.
        out: folder of the runs.
        run: remove the folder of the run too, which has ended.
    """
    (out / FAILED / f"{name}.json").unlink(missing_ok=True)
    if run:
        shutil.rmtree(out / name, ignore_errors=True)


def log_of(name: str, out: Path) -> Path:
    """Return the path of a run's log."""
    return out / LOGS / file_name(name, ".log", 255)


def changed_since(
    cells: Iterable[Cell], out: Path, weights_now: Callable[[str], str | None]
) -> Iterator[tuple[Cell, str]]:
    """Yield runs with a result of texts or weights that have changed since, and what differs.

    Settings are in the name of a run. `weights_now`: see `weights_hash`.
    """
    hash_of = cache(file_sha256)  # runs of other models and seeds read the same files
    for cell in cells:
        result = read_result(out / cell.name / RESULT)
        if result is not None and (
            differences := list(_differences(result, cell, out / cell.name, weights_now, hash_of))
        ):
            yield cell, "; ".join(differences)


def _differences(
    result: dict[str, Any],
    cell: Cell,
    folder: Path,
    weights_now: Callable[[str], str | None],
    hash_of: Callable[[Path], str],
) -> Iterator[str]:
    named = named_model(cell.model)
    path, first, source_hash = Path(named.source), str(result.get("weights", "")), result.get("source_weights")
    newest = None if is_checkpoint(path) else newest_step(path)
    if newest is not None and first not in ("", "scratch") and f"={newest};" not in f"{first};":
        yield f"its first weights are {first.split(';')[0]}, and {newest} is there now"
    elif (
        source_hash is not None
        and UNTRAINED not in named.baseline
        and weights_now(named.source) not in (source_hash, None)
    ):
        yield f"the weights in {named.source} have changed since"
    for name, file, sha256 in _files_read(result, folder):
        with suppress(OSError):  # removed files cannot be compared
            if hash_of(file) != sha256:
                yield f"{name}: {file} has changed since"


def _files_read(result: dict[str, Any], folder: Path) -> list[tuple[str, Path, str]]:
    """Return name, path and SHA-256 of the files that a run has read: retrieval records them in its result, fine-tuning
    with its shards."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        files = result.get(DATA_FILES) or read_json(folder / "task" / "task.json")["asked"]["files"]
        return [(name, Path(each["file"]), each["sha256"]) for name, each in files.items()]
    return []


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    jobs: int | None,
    finished: Callable[[], None],
    failures: Failures,
) -> bool:
    """Run cells, each in a separate process.

    Args:
        cells: those to run.
        out: folder of their folders.
        jobs: at a time; None: as many as there are GPUs, or one.
        finished: called after each that has a result.
        failures: receives those that fail.

    Returns:
        True if a signal came, here or to one of them.
    """
    by_name, begun, total, stopped = {cell.name: cell for cell in cells}, time.monotonic(), len(cells), False
    broken: dict[Any, Failure] = {}  # texts and model whose data are missing or damaged, for every seed
    on_cpu = any("compute.device=cpu" in cell.overrides for cell in cells)
    gpus = 0 if on_cpu else count_gpus()
    num_slots = min(jobs or gpus or 1, max(1, total))
    environment = {**os.environ, "PYTHONPATH": path_of_children()}
    own = environments(num_slots, environment, gpus, os.cpu_count() or 1)
    over = 0

    def fails(cell: Cell, failure: Failure) -> None:
        failures[cell.name] = failure
        record = {"exit_code": failure.exit_code, "message": failure.message, "run": failure.log.stem}
        with os_errors_as(StorageError, f"{out / FAILED}: cannot be written", "Free some space."):
            (out / FAILED).mkdir(exist_ok=True)
            write_whole(out / FAILED / f"{cell.name}.json", json.dumps(record) + "\n")
        if failure.exit_code == DataError.exit_code:
            broken[_texts(cell)] = failure

    def ended(job: Job, code: int) -> None:
        nonlocal over, stopped
        over += 1
        cell, took = by_name[job.name], duration(time.monotonic() - begun)
        result = read_result(out / cell.name / RESULT)
        if code == 0 and result is not None:
            print(f"[{over} of {total}, {took}] {cell.name}: {_in_words(result) or 'done'}", flush=True)
            finished()
        elif code == StoppedEarly.exit_code:
            stopped = True
        else:
            fails(cell, Failure(code, last_words(job.log), job.log))
            print(f"[{over} of {total}, {took}] {cell.name}: failed, exit code {code}; {job.log}", flush=True)

    def started() -> Iterator[Job]:
        for cell in cells:
            if (same := broken.get(_texts(cell))) is not None:
                fails(cell, same)
            else:
                yield Job(cell.name, _command(cell, out), log_of(cell.name, out))

    shown: dict[str, float] = {}

    def look(job: Job) -> bool:
        now = time.monotonic()
        if now - shown.setdefault(job.name, now) >= _LINE_SECONDS:
            shown[job.name] = now
            print(f"[{over} of {total}, {duration(now - begun)}] {job.name}: {newest_line(job.log)}", flush=True)
        return False

    return run_all(started(), own, ended, look) or stopped


def _texts(cell: Cell) -> tuple[object, ...]:
    """Return the texts and model that runs of other seeds and choices share; a choice may name other texts."""
    of_texts = (word for word in cell.overrides if re.split(r"[.=]", word)[0] in _TEXT_KEYS)
    return cell.texts or cell.task, cell.model, *of_texts


def _command(cell: Cell, out: Path) -> list[str]:
    own = [f"runs_folder={out}", f"name={cell.name}"] + ([] if cell.seed is None else [f"seed={cell.seed}"])
    words = [*cell.verb, cell.task, "--model", cell.model, *cell.overrides, *own]
    return [sys.executable, "-m", cell.module, *words]


def parse_cell_command() -> tuple[str, str, list[str], Path]:
    """Parse the command of a cell with another module: task, model, words, and the folder of its result."""
    task, _, model, *words, home, name = sys.argv[1:]
    return task, model, words, Path(home.partition("=")[2], name.partition("=")[2])


def _in_words(result: dict[str, Any]) -> str:
    columns = [(split, metric) for split, figures in result["figures"].items() for metric in figures]
    metrics = result["settings"].get("metrics")
    shown = [
        f"{split} {metric} {result['figures'][split][metric]}"
        if result["figures"][split][metric] is None
        else f"{split} {metric} {result['figures'][split][metric]:.4f}"
        for split, metric in columns
        if not metric.startswith(("baseline/", "num_", "loss")) and (not metrics or metric in metrics)
    ]
    return ", ".join(shown)
