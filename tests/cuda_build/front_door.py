"""Start the unmodified `launch/run.py` on the null device's GPUs, and read its results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cuda_build.null import environment
from tests.support.paths import ROOT
from tests.support.tiny_run import TINY_YAML

# widths whose gradients fill several of DDP's buckets, with as few layers as possible for both kinds of attention
WIDTHS = {
    "tiny": ("model.hidden_size=128", "model.num_heads=2", "model.intermediate_size=192"),
    "base": ("model.hidden_size=768", "model.num_heads=12", "model.intermediate_size=1152"),
    "large": ("model.hidden_size=1024", "model.num_heads=16", "model.intermediate_size=2624"),
}
JOURNEY = ("phases.short.tokens=15000", "phases.short.microbatch_tokens=64", "checkpoint.interval_steps=5")
PLAIN = ("compute.compile=false", "optim.fused=false")  # defaults of a case, for a faster start


@dataclass
class Machine:
    """A machine with GPUs that compute nothing.

    Attributes:
        folder: folder of the runs and of the device's files.
        data: prepared text.
        gpus: number of GPUs.
        root: the checkout whose launcher is started.
        settings: further environment variables.
    """

    folder: Path
    data: Path
    gpus: int
    root: Path = ROOT
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Violations of CUDA's or NCCL's rules since the machine was created."""
        file = self.folder / "faults"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def words(self, name: str, *overrides: str, width: str = "tiny") -> list[str]:
        """Return the arguments of a run of 70 steps: batch warmup, two phases, validation, checkpoints."""
        file = self.folder / f"{name}.yaml"
        file.write_text(TINY_YAML.format(runs=self.folder / "runs", data=self.data), encoding="utf-8")
        return [str(file), f"name={name}", "compute.device=cuda", *WIDTHS[width], *JOURNEY, *PLAIN, *overrides]

    def environment(self, visible: str | None = None) -> dict[str, str]:
        """Return the environment of a process on this machine; `visible` replaces CUDA_VISIBLE_DEVICES."""
        own = {
            "NULL_DEVICES": str(self.gpus),
            "CUDA_VISIBLE_DEVICES": visible or ",".join(map(str, range(self.gpus))),
            "NULL_NCCL": str(self.folder / "nccl"),
            "NULL_DEVICE_FAULTS": str(self.folder / "faults"),
            "PYTHONPATH": str(self.root),
        }
        return os.environ | environment() | own | self.settings

    @contextmanager
    def launched(self, *words: str, visible: str | None = None) -> Iterator[Launch]:
        """Start the launcher and its ranks; end them with the context."""
        (self.folder / "nccl").unlink(missing_ok=True)  # rendezvous file of one start's ranks
        log = self.folder / "output.txt"
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "launch/run.py", *words],
                cwd=self.root,
                env=self.environment(visible),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Launch(process, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def train(self, *words: str, seconds: float, visible: str | None = None) -> tuple[int, str]:
        """Start a run and wait for its end; return the exit code and the output."""
        with self.launched(*words, visible=visible) as launch:
            return launch.end(seconds)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far."""
        file = self.folder / "runs" / name / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of steps only."""
        return [line for line in self.metrics(name) if "lr" in line]


@dataclass
class Launch:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def end(self, seconds: float) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output.

        Raises:
            TimeoutError: it is still running; with the output.
        """
        try:
            return self.process.wait(seconds), self.output
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still there after {seconds} s:\n{self.output[-4000:]}") from None

    def until(self, found: Any, seconds: float) -> None:
        """Wait until `found()` is true; fail if the launcher ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not found():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"exit code {self.process.poll()}:\n{self.output[-4000:]}")
            time.sleep(0.2)


def planted_tree(to: Path, *changes: tuple[str, str, str]) -> Path:
    """Copy the product and replace some lines: (file, line that occurs once, its replacement)."""
    for folder in ("modernbert_train", "launch", "data_prep"):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line, instead in changes:
        path = to / file
        text = path.read_text(encoding="utf-8")
        assert text.count(line) == 1, (file, line)
        path.write_text(text.replace(line, instead), encoding="utf-8")
    return to


def journey(machine: Machine, name: str, ranks: int, overrides: Sequence[str], width: str, seconds: float) -> str:
    """Run until a signal stops it after some steps, then resume to the end; return both outputs."""
    words = [*machine.words(name, *overrides, width=width), "--ranks", str(ranks)]
    with machine.launched(*words) as launch:
        launch.until(lambda: len(machine.steps(name)) > 6, seconds)
        launch.process.send_signal(signal.SIGTERM)
        code, first = launch.end(seconds)
    assert code == 75, first[-4000:]
    stopped_at = machine.steps(name)[-1]["step"]
    code, second = machine.train(*words, seconds=seconds)
    assert code == 0, second[-4000:]
    steps = [line["step"] for line in machine.steps(name)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > stopped_at > 6
    return first + second
