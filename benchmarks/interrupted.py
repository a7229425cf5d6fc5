"""Interrupt a run by kill -9 of a rank and by SIGTERM, and resume it each time with the same command.

    python -m benchmarks.interrupted --after 8 --json found.json runs/mine launch/run.py RUN.yaml name=mine --ranks 8

The first start loses its last rank after --after steps and a checkpoint, the second is stopped after as many further
steps, and the third trains to the end. Exit code 0 if every start ended as documented in docs/faults.md, and no step is
missing or repeated. With --whole the command runs once more, uninterrupted and as NAME-whole, and every loss must be
the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modernbert_train.core.read_json import read_lines

ROOT = Path(__file__).resolve().parent.parent


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield process id and environment of every process of this user."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # another user's, or gone
        yield int(file.parent.name), dict(word.split("=", 1) for word in words if "=" in word)


def ranks_of(launcher: int) -> dict[int, int]:
    """Return rank -> process id, for ranks of a launcher, or the process itself if it trains alone."""
    ranks = {}
    for pid, environment in environments():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher and "RANK" in environment and environment.get("WORLD_SIZE") != "1":
            ranks[int(environment["RANK"])] = pid
    return ranks or {0: launcher}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the present lines of a run's record of this kind."""
    file = folder / "metrics.jsonl"
    return [entry for entry in read_lines(file)[0] if entry.get("kind") == kind] if file.exists() else []


class Start:
    """One start of the command; its output is printed and kept."""

    def __init__(self, command: list[str]) -> None:
        print(f"$ python {' '.join(command)}", flush=True)
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.output += line
            print(line, end="", flush=True)

    def end(self) -> int:
        """Wait for it; return the exit code."""
        code = self.process.wait()
        self._reader.join(5)  # bounded: a leftover child may hold the pipe
        return code

    def interrupt(self, folder: Path, steps: int, number: signal.Signals) -> float:
        """Signal it after this many further steps, and wait for its end; return the seconds from signal to end.

        Raises:
            SystemExit: it ended before.
        """
        before = len(records(folder, "step"))
        while len(records(folder, "step")) < before + steps or not list(folder.glob("checkpoints/step-????????")):
            if self.process.poll() is not None:
                sys.exit(f"ended with {self.end()} before it could be interrupted")
            time.sleep(0.02)
        kill = number == signal.SIGKILL
        ranks = ranks_of(self.process.pid)
        began = time.monotonic()
        os.kill(ranks[max(ranks)] if kill else self.process.pid, number)
        print(f"== {number.name} to {f'rank {max(ranks)}' if kill else 'the launcher'}", flush=True)
        self.end()
        return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("--after", type=int, default=8, help="steps of a start before it is interrupted")
    parser.add_argument("--whole", action="store_true", help="compare with the same run, not interrupted")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command for python")
    options = parser.parse_args()
    first = Start(options.command)
    killed = first.interrupt(options.folder, options.after, signal.SIGKILL)
    second = Start(options.command)
    stopped = second.interrupt(options.folder, options.after, signal.SIGTERM)
    last = Start(options.command).end()
    alone = first.process.returncode == -signal.SIGKILL
    steps = [entry["step"] for entry in records(options.folder, "step")]
    wrong = [
        text
        for text, holds in (
            (f"after kill -9 the code was {first.process.returncode}, not 70", alone or first.process.returncode == 70),
            ("the rank that was killed is not named", alone or "error: rank" in first.output),
            (f"after SIGTERM the code was {second.process.returncode}, not 75", second.process.returncode == 75),
            (f"the last start ended with {last}", last == 0),
            (f"the steps on record are {steps}", steps == list(range(1, len(steps) + 1))),
        )
        if not holds
    ]
    if options.whole:
        uninterrupted = options.folder.with_name(f"{options.folder.name}-whole")
        shutil.rmtree(uninterrupted, ignore_errors=True)  # of an earlier try
        code = Start([*options.command, f"name={uninterrupted.name}"]).end()
        mine, theirs = ([entry["loss"] for entry in records(each, "step")] for each in (options.folder, uninterrupted))
        if code != 0 or mine != theirs:
            wrong.append(f"the run that was not interrupted ended with {code}, its losses are {theirs}, not {mine}")
    measured = {
        "killed_seconds": killed,
        "stopped_seconds": stopped,
        "blocked_seconds": max(entry["blocked_seconds"] for entry in records(options.folder, "checkpoint")),
        "wrong": wrong,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    print(json.dumps(measured))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
