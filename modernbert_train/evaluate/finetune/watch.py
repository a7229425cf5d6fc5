"""Fine-tunings of a run that is still training: every checkpoint, as it comes, and a curve of what they came to.

The run knows nothing of it: it is asked for nothing, and no file that it writes is touched. What was measured stands in
a file beside its record, RUN/watch.jsonl, which `report` reads; all else lies in RUN/watch. A checkpoint is linked into
there as soon as it is seen, because the run removes old ones, and stays there until it is measured.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.checkpoints.manifest import CONFIG_YAML, MANIFEST, STATE
from modernbert_train.config.load import load_run
from modernbert_train.config.tools.finetune import TaskConfig
from modernbert_train.core.files import os_errors_as, write_whole
from modernbert_train.core.read_json import number, read_json, read_lines
from modernbert_train.core.text import tokens_text
from modernbert_train.errors import ConfigError, DataError, RunError, StorageError
from modernbert_train.evaluate.finetune.many import Cell, Outcome, held, refuse_other_settings, run_cells, tell
from modernbert_train.evaluate.finetune.result import PREDICTIONS, RESULT
from modernbert_train.evaluate.finetune.table import read_result, spread
from modernbert_train.evaluate.finetune.task import SEED, asked, read_task
from modernbert_train.report.page import write_report

WATCH, RECORD = "watch", "watch.jsonl"
_STEP = re.compile(r"step-\d{8,}")
_LOOK_SECONDS = 5.0
_LARGE_PARTS = ("checkpoints", "hf", "task")  # of a fine-tuning, removed once its figures are in the record


def watch(
    run: Path,
    tasks: Sequence[str],
    seeds: Sequence[int] | None,
    jobs: int | None,
    patience: float,
    overrides: Sequence[str],
) -> None:
    """Fine-tune every checkpoint of a run, until it has ended.

    Args:
        run: its folder; it need not have begun.
        tasks, seeds, jobs, overrides: see `finetune_many`.
        patience: seconds without a line of metrics.jsonl or a checkpoint after which the run counts as ended.

    Raises:
        ConfigError: the points that are there were made by other settings.
        StoppedEarly: a signal came; what was measured is kept, and what was begun goes on.
        RunError: some fine-tunings failed.
    """
    if run.exists() and not run.is_dir():
        raise ConfigError(f"--watch={run}: no folder of a run.")
    watched = Watched(run, tasks, seeds or [SEED], overrides)
    with held(run / WATCH):
        for left in (run / WATCH).glob(".step-*.partial"):  # by a killed command
            shutil.rmtree(left, ignore_errors=True)
        watched.compare()
        outcome, last_sign = Outcome(), time.time()
        while not outcome.stopped:
            watched.link()
            if (step := watched.next()) is not None:
                outcome = watched.measure(step, jobs, outcome)
                last_sign = time.time()
            elif watched.is_over():
                print(f"{run}: trained to its end, and every checkpoint is measured. `report {run}` draws them.")
                break
            elif time.time() - max(last_sign, watched.last_sign()) > patience:
                print(
                    f"{run}: no sign of training for {patience:.0f} s. The same command resumes when it trains again."
                )
                break
            else:
                time.sleep(min(_LOOK_SECONDS, patience / 4))
    tell(outcome, run / WATCH)


class At(NamedTuple):
    """Where a run was at a checkpoint."""

    step: int
    tokens: int
    phase: str


class Watched:
    """A run and what is measured of it.

    Args:
        run: its folder.
        tasks, seeds, overrides: see `watch`.
    """

    def __init__(self, run: Path, tasks: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]) -> None:
        self.run, self.folder, self.record = run, run / WATCH, run / RECORD
        self._seeds, self._overrides = list(seeds), overrides
        self._tasks: dict[str, tuple[str, TaskConfig, list[str]]] = {}  # by the name of their points
        for task in tasks:
            config, rest = read_task(task, overrides)
            name = Path(task).stem + (" frozen" if config.freeze else "")
            if name in self._tasks:
                raise ConfigError(f"task {task}: two are called {name}. Name each once.")
            self._tasks[name] = task, config, rest
        self._failed: set[str] = set()  # checkpoints that are left alone until the next start

    def compare(self) -> None:
        """Raises ConfigError if points of the same names were made by other settings: a curve must be of one kind."""
        refuse_other_settings([], self.folder, self._overrides)
        for entry in self._entries():
            name = entry.get("task")
            if name in self._tasks and entry.get("asked") != self._asked(name):
                raise ConfigError(
                    f"{self.record}: has points of {name} that were made by other settings or seeds:\n"
                    f"  {json.dumps(entry.get('asked'))} there\n  {json.dumps(self._asked(name))} now\n"
                    f"Restore them, or move {self.record.name} and {self.folder} away."
                )

    def _asked(self, name: str) -> dict[str, Any]:
        _, config, rest = self._tasks[name]
        return {**asked(config, str(self.run), rest), "seeds": self._seeds}

    def _entries(self) -> list[dict[str, Any]]:
        with os_errors_as(StorageError, f"{self.record}: cannot be read", "Fix the disk."):
            return read_lines(self.record)[0]

    def link(self) -> None:
        """Have every checkpoint that is not measured here too, by links; one that vanishes meanwhile is let go."""
        done = self._done()
        for source in sorted(self._checkpoints(self.run / "checkpoints"), key=_step):
            own = self.folder / source.name
            if own.exists() or _step(source) in done:
                continue
            staging = self.folder / f".{source.name}.partial"
            shutil.rmtree(staging, ignore_errors=True)
            try:
                staging.mkdir()
                for name in sorted(path.name for path in source.iterdir()):  # it loses its name before its files
                    _link(source / name, staging / name)
                staging.rename(own)
            except FileNotFoundError:
                shutil.rmtree(staging, ignore_errors=True)
                print(f"{source}: removed by the run before it could be measured", flush=True)
            except OSError as error:
                raise StorageError(
                    f"{own}: cannot be written ({error.strerror}). Free some space; the same command resumes."
                ) from None

    def _done(self) -> set[int]:
        """Steps that have a point of every task."""
        found: dict[str, set[int]] = {name: set() for name in self._tasks}
        for entry in self._entries():
            if entry.get("task") in found and isinstance(entry.get("step"), int):
                found[entry["task"]].add(entry["step"])
        return set.intersection(*found.values())

    @staticmethod
    def _checkpoints(folder: Path) -> list[Path]:
        if not folder.is_dir():
            return []
        return [path for path in folder.iterdir() if _STEP.fullmatch(path.name) and (path / MANIFEST).is_file()]

    def next(self) -> Path | None:
        """The oldest checkpoint that waits to be measured."""
        done = self._done()
        waiting = [path for path in self._checkpoints(self.folder) if path.name not in self._failed]
        for path in list(waiting):
            if _step(path) in done:  # killed between its point and its removal
                waiting.remove(path)
                shutil.rmtree(path, ignore_errors=True)
        return min(waiting, key=_step, default=None)

    def measure(self, checkpoint: Path, jobs: int | None, before: Outcome) -> Outcome:
        """Fine-tune a checkpoint on every task with every seed, and add its points to the record."""
        cells = {
            name: [
                Cell(task, str(checkpoint), seed, f"{name.replace(' ', '-')}-{checkpoint.name}-{seed}")
                for seed in self._seeds
            ]
            for name, (task, _, _) in self._tasks.items()
        }
        everything = [cell for its in cells.values() for cell in its]
        out = self.folder
        try:
            state = read_json(checkpoint / STATE)
            at = At(int(state["step"]), int(state["tokens"]), str(state["phase"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._failed.add(checkpoint.name)
            said = f"{checkpoint / STATE}: damaged ({error}). Remove {checkpoint}."
            return Outcome([*before.failed, (everything[0], StorageError.exit_code, said)])
        print(f"{checkpoint.name}, {tokens_text(at.tokens)} tokens", flush=True)
        refuse_other_settings(everything, out, self._overrides)
        missing = [cell for cell in everything if "asked" not in (read_result(out / cell.name / RESULT) or {})]
        outcome = run_cells(missing, out, jobs, self._overrides, meanwhile=self.link)
        outcome.failed = [*before.failed, *outcome.failed]
        results = {cell.name: read_result(out / cell.name / RESULT) for cell in everything}
        for name, its in cells.items():
            found = [result for cell in its if (result := results[cell.name]) is not None]
            if len(found) == len(its):
                self._add(name, found, at)
        if None in results.values():
            if not outcome.stopped:
                self._failed.add(checkpoint.name)
            return outcome
        shutil.rmtree(checkpoint, ignore_errors=True)
        for cell in everything:
            for part in _LARGE_PARTS:
                shutil.rmtree(out / cell.name / part, ignore_errors=True)
            (out / cell.name / PREDICTIONS).unlink(missing_ok=True)
        return outcome

    def _add(self, name: str, results: Sequence[dict[str, Any]], at: At) -> None:
        """Put the points of a checkpoint into the record: of each split the means over seeds."""
        entries = self._entries()
        if any(entry.get("task") == name and entry.get("step") == at.step for entry in entries):
            return
        for split in results[0]["figures"]:
            own = [result["figures"][split] for result in results]
            shown = [figure for figure in own[0] if not figure.startswith(("num_", "loss", "baseline/"))]
            spreads = {
                figure: spread(
                    {
                        str(result["seed"]): value
                        for result in results
                        if (value := number(result["figures"][split].get(figure))) is not None
                    }
                )
                for figure in shown
            }
            figures = {figure: None if found is None else found["mean"] for figure, found in spreads.items()}
            title = name if len(results[0]["figures"]) == 1 else f"{name} {split}"
            entries.append(
                {
                    "kind": "evaluation",
                    **at._asdict(),
                    "name": f"finetune {title}",
                    "figures": {**figures, "num_seeds": len(results)},
                    "task": name,
                    "split": split,
                    "seeds": {figure: None if found is None else found["seeds"] for figure, found in spreads.items()},
                    "asked": self._asked(name),
                    "time": round(time.time(), 3),
                }
            )
        with os_errors_as(
            StorageError, f"{self.record}: cannot be written", "Free some space; the same command resumes."
        ):
            write_whole(self.record, "".join(json.dumps(entry) + "\n" for entry in entries))
        with suppress(DataError, StorageError):  # before its first line there is nothing to draw
            write_report(self.run)

    def is_over(self) -> bool:
        """Whether the run has been trained to its end, and all of it was measured."""
        found = self._checkpoints(self.run / "checkpoints")
        try:
            tokens = max(read_json(path / STATE)["tokens"] for path in found)
            return bool(tokens >= load_run([self.run / CONFIG_YAML]).total_tokens)
        except (OSError, ValueError, KeyError, TypeError, RunError):
            return False  # just being replaced or removed

    def last_sign(self) -> float:
        """When the run last wrote a line of its record."""
        try:
            return (self.run / "metrics.jsonl").stat().st_mtime
        except OSError:
            return 0.0


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no such names.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
