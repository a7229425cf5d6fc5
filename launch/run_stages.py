"""Run commands one after the other, each printed first, so that a person can repeat them by hand.

A stage with an existing result is skipped. Ctrl-C and SIGTERM reach the running command, which handles them, and its
exit code ends the sequence. So the same command line continues an interrupted sequence.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from modernbert_train.checkpoints.evaluations import read_results
from modernbert_train.checkpoints.manifest import newest_step
from modernbert_train.cli.arguments import read_run
from modernbert_train.core.installed import CHECKOUT, path_of_children
from modernbert_train.distributed.run_jobs import start
from modernbert_train.errors import RunError, StoppedEarly
from modernbert_train.report.run_list import read_run_state

PROGRAM = ["-m", "modernbert_train"]  # arguments of Python
TYPED = "python -m modernbert_train" if CHECKOUT else "modernbert-train"
_WATCH_SECONDS = 5.0  # between two checks of a running command


class Stage(NamedTuple):
    """A command.

    Attributes:
        title: for a person.
        command: arguments of Python.
        done: returns True if its result exists; called just before the stage.
        watch: returns a warning, printed once, or None; called while the stage runs.
    """

    title: str
    command: Sequence[str]
    done: Callable[[], bool] = lambda: False
    watch: Callable[[], str | None] = lambda: None


def run_stages(stages: Sequence[Stage]) -> int:
    """Run the stages without a result; return the exit code of a command that failed or was stopped, or 0."""
    for number, stage in enumerate(stages, 1):
        head = f"[{number}/{len(stages)}] {stage.title}"
        if stage.done():
            print(f"\n{head}: done before", flush=True)
            continue
        print(f"\n{head}\n$ python {shlex.join(stage.command)}", flush=True)
        code = _call([sys.executable, *stage.command], stage.watch)
        if code == StoppedEarly.exit_code:
            print("stopped; the same command resumes from the checkpoint.", flush=True)
        if code < 0:
            from launch.rank_watch import how_it_ended  # loads torch, which a command line of a login node may lack

            killed = f"error: {stage.title}: the process {how_it_ended(code)}. The same command resumes."
            print(killed, file=sys.stderr, flush=True)
            return RunError.exit_code
        if code != 0:
            return code
    return 0


def _call(command: Sequence[str], watch: Callable[[], str | None]) -> int:
    """Run a command and wait for it; it receives Ctrl-C from the terminal and SIGTERM from here, and handles them.

    If this process is killed the kernel sends it SIGTERM, so no training continues unseen.
    """
    process = start(command, os.environ | {"PYTHONPATH": path_of_children()}, signal.SIGTERM, own_session=False)
    handlers = {
        signal.SIGINT: lambda number, frame: None,
        signal.SIGTERM: lambda number, frame: process.send_signal(number),
    }
    warned = False
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(None if warned else _WATCH_SECONDS)
            if (text := watch()) is not None:
                print(f"warning: {text}", file=sys.stderr, flush=True)
                warned = True
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def text_to_model(
    spec: Sequence[str],
    run: Sequence[str],
    *,
    ranks: int = 1,
    takes: str = "",
    watch: Callable[[], str | None] = lambda: None,
) -> list[Stage]:
    """Return the stages from text on disk to a measured and exported model with its report.

    Args:
        spec: YAML files and overrides of the data.
        run: YAML files and overrides of the run.
        ranks: GPUs that train.
        takes: expected time of the training, as text.
        watch: of the training, see `Stage`.
    """
    several = ["--ranks", str(ranks)] if ranks > 1 else []
    train = [*PROGRAM, "launch" if several else "train", *run, *several]
    return [
        Stage("text to tokens", [*PROGRAM, "prepare", *spec]),
        Stage("checking the run", [*PROGRAM, "check", *run, *several]),
        Stage(f"training{takes and f': {takes}'}", train, lambda: _is_trained(run), watch),
        Stage("measuring on held-out text", [*PROGRAM, "eval", *run], lambda: _is_measured(run)),
        Stage("exporting for transformers", [*PROGRAM, "export", *run], lambda: _is_exported(run)),
        Stage("drawing the report", [*PROGRAM, "report", *run]),
    ]


def _folder(run: Sequence[str]) -> Path:
    return Path(read_run([*run]).folder)


def _is_trained(run: Sequence[str]) -> bool:
    """True if the run has seen all of its tokens, also the ones that its YAML adds now."""
    folder = _folder(run)
    if not (folder / "config.yaml").is_file() or not (folder / "metrics.jsonl").is_file():
        return False
    state = read_run_state(folder, time.time())
    return state.state == "finished" and state.tokens >= read_run([*run]).total_tokens


def _is_measured(run: Sequence[str]) -> bool:
    folder = _folder(run)
    newest = newest_step(folder)
    return newest is not None and any(result.checkpoint == newest.name for result in read_results(folder))


def _is_exported(run: Sequence[str]) -> bool:
    """True if an exported model is newer than the newest checkpoint; exports are written atomically."""
    folder = _folder(run)
    newest, model = newest_step(folder), folder / "hf" / "model.safetensors"
    return newest is not None and model.is_file() and model.stat().st_mtime >= newest.stat().st_mtime
