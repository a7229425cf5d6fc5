"""A small run that can be injured: its data, its command, how it ends, and the expected result."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.drill import warm
from benchmarks.drill.warm import Hook
from data_prep.make_tokenizer import save_tokenizer
from modernbert_train.data.shard_writer import ShardWriter
from modernbert_train.vocabulary import read_vocabulary

VOCABULARY = 128
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
SECONDS = 240.0  # no start takes longer on a busy machine
ORPHAN_SECONDS = 30.0
DOCUMENTED = (64, 65, 70, 74, 75, 78, 124)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# of a line of metrics.jsonl: the training results, without time or machine
TRAINED = (
    *("kind", "step", "tokens", "phase", "rows", "row_tokens", "predicted", "loss", "lr", "grad_norm", "update_norm"),
)

YAML = """\
name: run
runs_folder: {folder}
seed: 5
compute: {{device: cpu}}
data:
  train: {data}/train
  tokenizer: {data}/tokenizer
  packing_window: 8
  max_wait_rows: 32
  shuffle_block_shards: 2
  num_workers: 0
  worker_timeout_seconds: 4
  download_timeout_seconds: 1
model:
  vocab_size: 128
  hidden_size: 16
  num_layers: 1
  num_heads: 2
  intermediate_size: 24
  local_attention: 16
  attention_out_dropout: 0.1
optim: {{name: stable_adamw, lr: 5e-3}}
phases:
  short:
    tokens: 10000
    row_tokens: 64
    batch_rows: 8
    microbatch_tokens: 128
    schedule: {{warmup_tokens: 500}}
  long:
    tokens: 3000
    row_tokens: 128
    batch_rows: 4
    microbatch_tokens: 128
    schedule: {{decay_tokens: 1000}}
checkpoint: {{interval_seconds: null, interval_steps: 2}}
distributed: {{timeout_seconds: 8}}
logging: {{progress_bar: false}}
"""

# of several ranks: gradients of 1.5 MB, which fill more than one of DDP's buckets
WIDE = ("model.hidden_size=192", "model.intermediate_size=288")

Verdict = Literal["survived", "refused", "lost", "skipped"]
WORKERS = "data.num_workers=2"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one injury.

    Attributes:
        what: the injury and its place.
        verdict: survived: the same command ended in the same losses and weights as a run without injuries. refused:
            ended with a documented code and an error without a traceback. lost: anything else. skipped: not possible
            here, with the reason.
        detail: evidence, if needed.
    """

    what: str
    verdict: Verdict
    detail: str = ""


class Result(NamedTuple):
    """The records and weights of an uninterrupted run."""

    records: list[dict[str, Any]]
    weights: str


class Ended(NamedTuple):
    """How a start ended."""

    code: int
    said: str

    def wrong(self, *codes: int) -> str:
        """Return the problem if it did not end with one of these codes; empty if it did."""
        if "Traceback (most recent" in self.said:
            return f"a traceback, code {self.code}: {self.said[-400:]}"
        if self.code not in codes:
            return f"code {self.code} instead of {codes}: {self.said[-400:]}"
        if self.code in DOCUMENTED and self.code != 75 and "error: " not in self.said:
            return f"code {self.code} without an error"
        return ""


class Trainer:
    """One start of a run.

    Attributes:
        pid: of its launcher, or of its only rank.
    """

    def __init__(self, process: warm.Forked, output: Path, ranks: int) -> None:
        self._process = process
        self._output = output
        self._ranks = ranks
        self.pid = process.pid
        self.began = time.monotonic()

    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Wait until it has ended; after the time limit kill it, with code 999."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            for pid in [*warm.descendants(self.pid), self.pid]:
                kill(pid)
            self._process.wait()
            code = 999
        return Ended(code, self.said())

    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that have started."""
        return [self.pid] if self._ranks == 1 else warm.children(self.pid)

    def workers(self) -> list[int]:
        return [worker for rank in self.ranks() for worker in warm.children(rank)]

    def until(self, ready: Callable[[], object]) -> bool:
        """Wait until a condition holds; False if the run ends before."""
        while not ready():
            if not self.running():
                return False
            time.sleep(0.002)
        return True


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Run:
    """A run's folder, and its command, which is always the same.

    Attributes:
        folder: of the run.
        ranks: processes that train.
    """

    def __init__(self, lab: Lab, runs_folder: Path, ranks: int, overrides: tuple[str, ...]) -> None:
        self.lab, self.ranks, self.overrides = lab, ranks, overrides
        self.folder = runs_folder / "run"
        self._starts = 0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def words(self) -> list[str]:
        size = WIDE if self.ranks > 1 else ()
        return ["train", str(self.lab.yaml), f"runs_folder={self.folder.parent}", *size, *self.overrides]

    def start(self, *, hook: Hook = lambda: None, ranks: int | None = None, more: tuple[str, ...] = ()) -> Trainer:
        self._starts += 1
        ranks = ranks or self.ranks
        output = self.lab.folder / "output" / f"{self.folder.parent.name}-{self._starts}.txt"
        output.parent.mkdir(exist_ok=True)
        output.write_bytes(b"")
        environment = {"TMPDIR": str(self.lab.temporary)}
        process = warm.start([*self.words(), *more], output, ranks=ranks, environment=environment, hook=hook)
        return Trainer(process, output, ranks)

    def finish(self, *, hook: Hook = lambda: None, ranks: int | None = None, more: tuple[str, ...] = ()) -> Ended:
        return self.start(hook=hook, ranks=ranks, more=more).wait()

    def records(self) -> list[dict[str, Any]]:
        """Return its training records, a line for each step."""
        records = []
        file = self.folder / "metrics.jsonl"
        for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # torn by a kill
            if entry.get("kind") in ("step", "validation"):
                records.append({key: entry[key] for key in TRAINED if key in entry})
        return records

    def weights(self) -> str:
        """Return a hash of the weights that the run exports."""
        out = self.lab.temporary / f"export-{self.folder.parent.name}"
        log = self.lab.folder / "output" / "export.txt"
        words = ["export", str(self.folder), "--out", str(out)]
        code = warm.start(words, log, environment={"TMPDIR": str(self.lab.temporary)}, hook=lambda: None).wait(SECONDS)
        if code != 0:
            return f"export ended with {code}: {log.read_text(errors='replace')[-300:]}"
        sha256 = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
        shutil.rmtree(out)
        return sha256

    def differs(self, result: Result) -> str:
        """Return how the finished run differs from an uninterrupted one; empty if it does not."""
        mine = self.records()
        if len(mine) != len(result.records):
            return f"{len(mine)} records, the uninterrupted run has {len(result.records)}"
        for one, other in zip(mine, result.records, strict=True):
            if one != other:
                return f"step {one.get('step')}: {one}, the uninterrupted run has {other}"
        sha256 = self.weights()
        return "" if sha256 == result.weights else f"weights {sha256}, the uninterrupted run has {result.weights}"

    def settle(self, *, more: tuple[str, ...] = ()) -> str:
        """Repeat the command to the end, and compare; return the problem, or nothing."""
        ended = self.finish(more=more)
        return ended.wrong(0) or self.differs(self.lab.reference(self.ranks, self.overrides)) or self.left()

    def left(self) -> str:
        """Return the leftovers of a finished run, except torch's compile cache; empty without any."""
        folders = [self.lab.temporary] + ([Path("/dev/shm")] if self.lab.private else [])
        left_over = [str(path) for folder in folders for path in folder.iterdir() if "torchinductor" not in path.name]
        left_over += [str(path) for path in self.checkpoints.iterdir() if not STEP.fullmatch(path.name)]
        left_over += [str(path) for path in self.folder.glob(".*.partial")]
        return f"left behind: {', '.join(left_over)[:300]}" if left_over else ""


STEP = re.compile(r"step-\d+")
Strike = Callable[[Run, Trainer, random.Random], str | None]  # the injury; None if the run ended before


class Lab:
    """The place where runs are injured.

    Args:
        folder: created if missing; its data and references are reused.
        seed: of all injuries.

    Attributes:
        private: True if this process has a private /dev/shm.
        orphans: the longest time that a process has lived after the end of its run, in seconds.
        servers: processes that belong to no run, and stay.
    """

    def __init__(self, folder: Path, seed: int, private: bool) -> None:
        self.folder, self.seed, self.private = folder, seed, private
        self.temporary = folder / "t"  # short: a socket's path is
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.data = folder / "data"
        self.yaml = folder / "run.yaml"
        self.orphans = 0.0
        self.servers: set[int] = set()
        self._references: dict[tuple[int, tuple[str, ...]], Result] = {}
        self._runs = 0
        if not (self.data / "train/dataset.json").exists():
            shutil.rmtree(self.data, ignore_errors=True)
            write_data(self.data)
        self.yaml.write_text(YAML.format(folder=folder / "runs", data=self.data), encoding="utf-8")

    def run(self, ranks: int = 1, *overrides: str, under: Path | None = None) -> Run:
        """Return a run that has not started."""
        self._runs += 1
        run_folder = (under or self.folder / "runs") / f"{os.getpid()}-{self._runs}"
        return Run(self, run_folder, ranks, overrides)

    def remove(self, run: Run) -> None:
        shutil.rmtree(run.folder.parent, ignore_errors=True)

    def reference(self, ranks: int = 1, overrides: tuple[str, ...] = ()) -> Result:
        """Return the result of the undisturbed run."""
        key = ranks, tuple(each for each in overrides if not each.startswith(HARMLESS))
        if key not in self._references:
            run = self.run(ranks, *overrides)
            ended = run.finish()
            if ended.code != 0:
                raise RuntimeError(f"a run without injuries ended with {ended.code}:\n{ended.said}")
            self._references[key] = Result(run.records(), run.weights())
            self.remove(run)
        return self._references[key]

    def stopped(self, ranks: int = 1, *overrides: str) -> Run:
        """Return a copy of a run that was killed near its end and has kept all of its checkpoints."""
        name = self.folder / "stopped" / f"{ranks}-{hashlib.sha256(repr(overrides).encode()).hexdigest()[:8]}"
        words = (*overrides, "checkpoint.keep=100")
        if not name.exists():
            run = Run(self, name.with_name(f"{name.name}.made"), ranks, words)
            shutil.rmtree(run.folder.parent, ignore_errors=True)
            steps = len(self.reference(ranks, words).records)
            trainer = run.start(hook=slow_steps)
            trainer.until(lambda: len(run.records()) >= steps - 4)
            kill(trainer.pid)
            trainer.wait()
            self.wait_until_gone()
            for path in run.checkpoints.iterdir():
                if not STEP.fullmatch(path.name):
                    shutil.rmtree(path)
            run.folder.parent.rename(name)
        run = self.run(ranks, *words)
        shutil.copytree(name, run.folder.parent)
        return run

    def draw(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed}/{'/'.join(map(str, key))}")

    def wait_until_gone(self) -> str:
        """Wait for the end of every process that runs have left; says what did not end in time."""
        began = time.monotonic()
        while alive := [pid for pid in warm.descendants(os.getpid()) if pid not in self.servers]:
            if time.monotonic() - began > ORPHAN_SECONDS:
                words = [f"{pid} of {Path(f'/proc/{pid}/stat').read_text()[:60]}" for pid in alive if warm.alive(pid)]
                for pid in alive:
                    kill(pid)
                return f"orphans after {ORPHAN_SECONDS:.0f} s: {words}"
            time.sleep(0.01)
        self.orphans = max(self.orphans, time.monotonic() - began)
        warm.reap()
        return ""


HARMLESS = ("data.num_workers=", "checkpoint.keep=", "data.worker_timeout_seconds=", "distributed.timeout_seconds=")


def slow_steps(seconds: float = 0.05) -> None:
    """Hook: make each step take this much longer, so that there is time for an injury."""
    from modernbert_train.train.recorder import Recorder

    real = Recorder.step

    def step(self: Recorder, *arguments: Any) -> None:
        time.sleep(seconds)
        real(self, *arguments)

    Recorder.step = step  # type: ignore[method-assign, assignment]


def slow_disk(seconds: float = 0.02) -> None:
    """Hook: make each sync to disk take this long."""
    real = os.fsync

    def fsync(handle: int) -> None:
        time.sleep(seconds)
        real(handle)

    os.fsync = fsync  # type: ignore[assignment]


def clock_off(seconds: float, after: float = 0.0) -> None:
    """Hook: shift the wall clock by this much, from some seconds on."""
    real, began = time.time, time.monotonic()

    def shifted() -> float:
        return real() + (seconds if time.monotonic() - began >= after else 0.0)

    time.time = shifted
    time.time_ns = lambda: int(shifted() * 1e9)


def hooks(*each: Hook) -> Hook:
    return lambda: [hook() for hook in each]


def write_data(folder: Path) -> None:
    """Write about 80 documents of known words in several shards, and their tokenizer."""
    words: Mapping[str, int] = {name: number for number, name in enumerate(SPECIAL)} | {
        f"w{number}": number for number in range(len(SPECIAL), VOCABULARY)
    }
    tokenizer = Tokenizer(WordLevel(dict(words), unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True)
    save_tokenizer(tokenizer, folder / "tokenizer")
    vocabulary = read_vocabulary(folder / "tokenizer")
    draw = np.random.default_rng(3)
    writer = ShardWriter(folder / "train", vocabulary.num_entries, vocabulary.sha256, 1 << 11)
    for length in [3, 400, *np.clip(draw.lognormal(3.5, 1.0, 78), 3, 400).astype(int)]:
        writer.write(draw.integers(len(SPECIAL), VOCABULARY, int(length)).tolist())
    writer.finish()


slow_saves = partial(slow_disk, 0.02)
Round = Callable[[Lab, random.Random, int], list[Outcome]]
