"""List the runs in a folder, each in a line, quickly and without torch.

The list reads a run's configuration, the end of metrics.jsonl, starts.jsonl, and the state of its lock. It names
damaged folders and lists the others; reading never changes a run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modernbert_train.checkpoints.manifest import step_folders
from modernbert_train.checkpoints.provenance import Start, read_starts
from modernbert_train.config.evals import BITS_PER_BYTE
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.core.files import errors_to, lock_now
from modernbert_train.core.read_json import number, open_file, parse_object
from modernbert_train.core.text import duration, fixed, percent, printable, table, tokens_text, whole
from modernbert_train.errors import ConfigError
from modernbert_train.report.training_loss import LOSS_STEPS, losses_of, mean, training_loss

_FIRST_BYTES, _MAX_BYTES = 1 << 16, 1 << 24  # read from the end of metrics.jsonl: at first, and at most
_REASON = 100  # maximum characters of a run's error
_MAX_WIDTH = 20  # maximum characters of a number


@dataclass(frozen=True)
class RunState:
    """One run; None for a value that no record has.

    Attributes:
        folder, name: of the run.
        state: training, finished, stopped, failed, interrupted (killed before it could record its end) or not begun;
            average for an average of checkpoints.
        reason: error of a failed run.
        tokens, total_tokens: seen and planned.
        loss, held_out_loss: mean of the last steps, and the last measurement.
        measured: objective, text and number of predictions of the held-out loss; only losses with the same compare.
        bits_per_byte: held-out loss over the bytes of the text, comparable between tokenizers.
        tokens_per_second: over the last steps.
        age_seconds: since the last line of its record.
    """

    folder: str
    name: str
    state: str
    reason: str | None
    tokens: int
    total_tokens: int
    loss: float | None
    held_out_loss: float | None
    measured: str | None
    bits_per_byte: float | None
    tokens_per_second: float | None
    age_seconds: float | None


def list_runs(folders: Sequence[Path], now: float | None = None) -> tuple[list[RunState], list[str]]:
    """Return the runs, newest first, and a line for each folder that could not be read.

    Args:
        folders: each a run, or a folder of runs.
        now: unix time.

    Raises:
        ConfigError: a folder is missing.
    """
    require_folders("report", folders)
    runs: list[RunState] = []
    wrong: list[str] = []

    def leave_out(why: str) -> None:
        wrong.append(f"{folder}: left out, {why.splitlines()[0]}")

    for folder in run_folders(folders, "config.yaml"):
        with errors_to(leave_out, OSError, ValueError, ConfigError):
            runs.append(read_run_state(folder, time.time() if now is None else now))
    runs.sort(key=lambda run: math.inf if run.age_seconds is None else run.age_seconds)
    return runs, wrong


def require_folders(command: str, folders: Iterable[Path]) -> None:
    """Raise ConfigError if a folder that a user named is missing."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(
                f"{command} {folder}: no such folder. Name runs, or a folder that holds runs, as runs_folder of a run "
                "does."
            )


def run_folders(folders: Iterable[Path], *files: str) -> list[Path]:
    """Return run folders, which hold one of these files: each given folder, or else its direct subfolders."""
    unique: dict[Path, None] = {}

    def is_run(folder: Path) -> bool:
        return any((folder / name).is_file() for name in files)

    for folder in folders:
        with suppress(OSError):  # removed meanwhile, or its disk is unavailable for a moment
            unique |= dict.fromkeys([folder] if is_run(folder) else filter(is_run, sorted(folder.iterdir())))
    return list(unique)


def read_run_state(folder: Path, now: float) -> RunState:
    """Read the state of one run.

    Raises:
        ConfigError: its configuration cannot be read, or is another version's.
        OSError: a file cannot be read.
    """
    config = load_run([folder / "config.yaml"])
    entries = last_entries(folder / "metrics.jsonl", held_out=config.data.validation is not None)
    steps = [entry for entry in entries if entry.get("kind") == "step"]
    tokens = int(next((value for e in reversed(entries) if (value := number(e.get("tokens"))) is not None), 0))
    last = next((value for e in reversed(entries) if (value := number(e.get("time"))) is not None), None)
    held_out = [entry for entry in entries if entry.get("kind") == "validation"]
    starts = read_starts(folder)
    state = run_state(folder, starts, done=tokens >= config.total_tokens, begun=bool(entries))
    return RunState(
        folder=str(folder),
        name=config.name,
        state=state,
        reason=starts[-1].error[:_REASON] or None if state == "failed" else None,
        tokens=tokens,
        total_tokens=config.total_tokens,
        loss=training_loss(losses_of(entries)),
        held_out_loss=_mean(held_out[-1:], "loss"),
        measured=_measured(config, held_out[-1]) if held_out else None,
        bits_per_byte=_mean(held_out[-1:], BITS_PER_BYTE),
        tokens_per_second=_mean(steps, "tokens_per_second"),
        age_seconds=None if last is None else max(0.0, now - last),
    )


def _measured(config: RunConfig, validation: Mapping[str, Any]) -> str:
    objective = config.in_phase.get(str(validation.get("phase")), config).objective
    name = f"{objective.name} from {objective.predict_from}"
    return f"{name}, {config.data.validation}, {validation.get('predicted')} predicted"


def run_state(folder: Path, starts: Sequence[Start], *, done: bool, begun: bool) -> str:
    """Return the state of a run, see `RunState`.

    Args:
        folder: of the run.
        starts: of the run.
        done: True if it has seen all of its tokens.
        begun: True if it has a record.
    """
    outcome = starts[-1].outcome if starts else ""
    if in_use(folder):
        return "training"
    if outcome == "failed":
        return "failed"
    if done or outcome == "finished":
        return "finished"
    if not begun:
        return "average" if step_folders(folder / "checkpoints") else "not begun"
    return "stopped" if outcome == "stopped" else "interrupted"


def in_use(run: Path) -> bool:
    """True if a process holds the lock of a run."""
    with suppress(OSError), (run / ".lock").open(encoding="utf-8") as file:  # no file, or a file system without locks
        return not lock_now(file, shared=True)
    return False


def last_entries(path: Path, *, held_out: bool) -> list[dict[str, Any]]:
    """Read the end of a record: enough lines for the last steps, and for a validation if there is one.

    Raises:
        OSError: the file exists and cannot be read.
    """
    size = _FIRST_BYTES
    while path.exists():
        with open_file(path) as file:
            end = file.seek(0, os.SEEK_END)
            first = max(0, end - size)
            file.seek(first)
            lines = file.read(end - first).split(b"\n")
        entries = [entry for line in lines[first > 0 :] if (entry := parse_object(line)) is not None]
        kinds = [entry.get("kind") for entry in entries]
        enough = len(losses_of(entries)) >= LOSS_STEPS and ("validation" in kinds or not held_out)
        if enough or first == 0 or size >= _MAX_BYTES:
            return entries
        size *= 8
    return []


def _mean(entries: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [value for entry in entries[-LOSS_STEPS:] if (value := number(entry.get(key))) is not None]
    finite = [value for value in values if math.isfinite(value)]
    return mean(finite) if finite else None


def as_text(runs: Sequence[RunState]) -> str:
    """Format runs, at least one, as a table."""
    rows = [("run", "state", "tokens", "of", "done", "loss", "held-out", "bits/byte", "tok/s", "age")]
    for run in runs:
        rows.append(
            (
                printable(run.name),
                run.state,
                _shown(run.tokens, tokens_text),
                _shown(run.total_tokens, tokens_text),
                percent(1)(min(1.0, run.tokens / run.total_tokens)) if run.total_tokens else "-",
                _shown(run.loss, fixed(3)),
                _shown(run.held_out_loss, fixed(3)),
                _shown(run.bits_per_byte, fixed(3)),
                _shown(run.tokens_per_second, whole),
                _shown(run.age_seconds, duration),
            )
        )
    failed = [printable(f"{run.name}: {run.reason}") for run in runs if run.reason]
    return "\n".join([table(rows), *failed])


def as_json(runs: Sequence[RunState]) -> str:
    """Format runs as JSON."""
    return json.dumps([asdict(run) for run in runs], indent=2)


def _shown(value: float | None, as_text: Callable[[float], str]) -> str:
    """Format a number in a column; one of a damaged record may have three hundred digits."""
    text = "-" if value is None else as_text(value)
    return text if value is None or len(text) <= _MAX_WIDTH else f"{value:.2e}"
