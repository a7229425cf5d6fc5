"""Many runs by one command, each a process of its own.

Nothing is remembered but what the runs themselves leave. A run with a result is done; one that was cut goes on from its
checkpoint; one that failed is tried again by the same command. So this process can be killed at any moment.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from modernbert_train.evaluate.finetune.result import RESULT, read_result
from modernbert_train.evaluate.finetune.task import named_model, newest_checkpoint

LOGS = "logs"


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


def refuse_changed(cells: Sequence[Cell], out: Path) -> None:
    """Refuse results whose texts or first weights are others by now; settings are in the name of a run.

    Raises:
        ConfigError: names each run and what differs.
    """
    wrong = []
    for cell in cells:
        result = read_result(out / cell.name / RESULT)
        if cell.verb == Cell.verb and result is not None and (other := _differences(result, cell, out / cell.name)):
            wrong.append(f"{out / cell.name}: {'; '.join(other)}")
    if wrong:
        raise ConfigError(
            "results of other texts or weights:\n  "
            + "\n  ".join(wrong)
            + "\nRestore them, name another folder, or remove these."
        )


def _differences(result: dict[str, Any], cell: Cell, folder: Path) -> list[str]:
    newest = newest_checkpoint(named_model(cell.model).source)
    first = str(result.get("weights", ""))
    found = []
    if newest is not None and first != "scratch" and f"={newest};" not in f"{first};":
        found.append(f"its first weights are {first.split(';')[0]}, and {newest} is there now")
    return found + list(_changed_files(folder / "task" / "task.json"))


def _changed_files(about: Path) -> Iterator[str]:
    """Texts of a result that are others by now."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # what is not there any more cannot be compared
        files = read_json(about)["asked"]["files"]
        for name, file in files.items():
            if file_sha256(Path(file["file"])) != file["sha256"]:
                yield f"{name}: {file['file']} has changed since"


def run_cells(
    cells: Sequence[Cell],
    out: Path,
    jobs: int | None,
    finished: Callable[[], None],
) -> Outcome:
    """Run fine-tunings, each a process of its own.

    Args:
        cells: those to run.
        out: folder of their folders.
        jobs: at a time; None: as many as there are GPUs, or one.
        finished: called after each that has a result.
    """
    outcome, by_name, begun, total = Outcome(), {cell.name: cell for cell in cells}, time.monotonic(), len(cells)
    on_cpu = any("compute.device=cpu" in cell.overrides for cell in cells)
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
        Job(cell.name, _command(cell, out), out / LOGS / f"{cell.name}.log") for cell in cells if not without_data(cell)
    )
    outcome.stopped |= run_all(jobs_of, own, ended)
    return outcome


def _command(cell: Cell, out: Path) -> list[str]:
    own = [f"runs_folder={out}", f"name={cell.name}"] + ([] if cell.seed is None else [f"seed={cell.seed}"])
    words = [*cell.verb, cell.task, "--model", cell.model, *cell.overrides, *own]
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
        StoppedEarly: a signal came, and the runs have saved.
        RunError: some of them failed; all others are done.
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
