"""The same injuries to a run of Composer and Streaming as they come, on the same data: what their own resuming stands.

    python -m benchmarks.drill.stock --out /tmp/stock

A model of two layers of torch's own encoder, masked language modelling, StreamingDataset over the drill's shards, a
checkpoint every second batch, all of them kept, `autoresume=True`, Composer's signal handling as it is. The same
command is given until it ends, as a cluster that restarts jobs would. An injury counts as

    survived  it ended, in the weights of a run without injuries
    stopped   the command failed three times in a row: a person has to look
    other     it ended in other weights, without a word

Our own format is not asked for: what is compared is whether the weights are those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drill import warm
from benchmarks.drill.damaged import flip_bit, truncate
from benchmarks.drill.lab import VOCABULARY, Trainer, kill, write_data

STEPS = 24
TRIES = 3  # failures in a row before a person is called
BATCH, WIDTH, LONGEST = 8, 16, 64
COUNTS = {"kill": 20, "kill-save": 20, "sigterm": 20, "truncate": 20, "flip": 40}
VERDICTS = ("survived", "stopped", "other")


def train(data: Path, folder: Path, step_seconds: float) -> int:
    """One start of the run; prints "step N" for each batch, and has weights.sha256 in its folder at its end."""
    import torch
    from composer import Callback, ComposerModel, Trainer
    from composer.core import State
    from composer.loggers import Logger
    from streaming import StreamingDataset
    from torch import nn
    from torch.utils.data import DataLoader

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            self.masked = torch.rand(batch.shape, generator=torch.Generator().manual_seed(int(batch.sum()))) < 0.3
            hidden = self.layers(self.embed(batch.masked_fill(self.masked, 3)))
            scores: torch.Tensor = self.head(hidden)
            return scores

        def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs[self.masked], batch[self.masked])

    class Tell(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            print(f"step {state.timestamp.batch.value}", flush=True)
            time.sleep(step_seconds)

    def collate(documents: list[dict[str, Any]]) -> torch.Tensor:
        rows = torch.zeros(len(documents), LONGEST, dtype=torch.long)
        for row, document in zip(rows, documents, strict=True):
            ids = torch.from_numpy(document["tokens"][:LONGEST].astype("int64"))
            row[: len(ids)] = ids
        return rows

    torch.set_num_threads(1)
    torch.manual_seed(5)
    dataset = StreamingDataset(local=str(data / "train"), shuffle=True, shuffle_seed=5, batch_size=BATCH)
    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(dataset, BATCH, collate_fn=collate, drop_last=True),
        optimizers=torch.optim.AdamW(model.parameters(), 5e-3),
        max_duration=f"{STEPS}ba",
        seed=5,
        run_name="run",
        save_folder=str(folder),
        save_interval="2ba",
        save_overwrite=False,
        autoresume=True,
        callbacks=[Tell()],
        progress_bar=False,
        log_to_console=False,
        device="cpu",
    )
    trainer.fit()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    (folder / "weights.sha256").write_text(digest.hexdigest())
    trainer.close()
    return 0


class Runs:
    """Starts of such a run in forks of this process."""

    def __init__(self, out: Path) -> None:
        self.out, self._number = out, 0
        (out / "output").mkdir(parents=True, exist_ok=True)
        if not (out / "data").exists():
            write_data(out / "data")
        folder = self.folder()
        ended = self.start(folder, 0.0).wait()
        if ended.code != 0:
            raise RuntimeError(f"a run without injuries ended with {ended.code}:\n{ended.said}")
        self.expected = (folder / "weights.sha256").read_text()

    def folder(self) -> Path:
        self._number += 1
        return self.out / "runs" / f"{os.getpid()}-{self._number}"

    def start(self, folder: Path, step_seconds: float = 0.05) -> Trainer:
        output = self.out / "output" / f"{folder.name}-{time.monotonic_ns()}.txt"
        output.write_bytes(b"")

        def program() -> int:
            os.setsid()
            warm._print_to(output)
            return train(self.out / "data", folder, step_seconds)

        return Trainer(warm.Forked(program), output, 1)

    def settle(self, folder: Path) -> tuple[str, str]:
        """Give the command until it ends; the verdict, and what was said last."""
        said = ""
        for _ in range(TRIES):
            ended = self.start(folder, 0.0).wait()
            self.clean()
            if ended.code == 0:
                same = (folder / "weights.sha256").read_text() == self.expected
                return ("survived", "") if same else ("other", "other weights")
            lines = [line for line in ended.said.splitlines() if line.strip()]
            said = f"code {ended.code}: {lines[-1] if lines else ''}"
        return "stopped", said[:160]

    def clean(self) -> None:
        for pid in warm.descendants(os.getpid()):
            kill(pid)
        warm.reap()


Injure = Callable[[Runs, Path, random.Random], str]


def killed(number: signal.Signals, in_save: bool) -> Injure:
    def injure(runs: Runs, folder: Path, draw: random.Random) -> str:
        """Struck once, at a step; inside a save: as soon as a new file of a checkpoint is there."""
        trainer, step = runs.start(folder), 1 + draw.randrange(STEPS - 2)
        trainer.until(lambda: f"step {step}\n" in trainer.said())
        if in_save:
            before = set(folder.glob("*.pt"))
            trainer.until(lambda: set(folder.glob("*.pt")) - before)
        deadline = time.monotonic() + (0.002 if in_save else 0.1) * draw.random()
        trainer.until(lambda: time.monotonic() > deadline)
        kill(trainer.pid, number)
        trainer.wait(60)
        runs.clean()
        return f"{number.name} at step {step}{', inside a save' if in_save else ''}"

    return injure


def damaged(harm: Callable[[Path, random.Random], str]) -> Injure:
    def injure(runs: Runs, folder: Path, draw: random.Random) -> str:
        """Killed near its end, and its newest checkpoint harmed; the older ones are whole."""
        trainer, step = runs.start(folder), STEPS - 4
        trainer.until(lambda: f"step {step}\n" in trainer.said())
        kill(trainer.pid)
        trainer.wait()
        runs.clean()
        newest = max((path for path in folder.glob("ep*.pt")), key=lambda path: path.stat().st_mtime_ns)
        return f"{newest.name}: {harm(newest, draw)}"

    return injure


INJURIES: dict[str, tuple[str, Injure]] = {
    "kill": ("kill -9", killed(signal.SIGKILL, in_save=False)),
    "kill-save": ("kill -9 inside a save", killed(signal.SIGKILL, in_save=True)),
    "sigterm": ("SIGTERM", killed(signal.SIGTERM, in_save=False)),
    "truncate": ("the newest checkpoint cut at one of six places", damaged(truncate)),
    "flip": ("a bit flipped in the newest checkpoint", damaged(flip_bit)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drill.stock", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seed", type=int, default=1, help="of all injuries; default 1")
    parser.add_argument("--only", nargs="+", choices=INJURIES, metavar="KIND", help=", ".join(INJURIES))
    parser.add_argument("--scale", type=float, default=1.0, help="so much of the whole")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm.private_mounts()
    warm.prepare()
    runs = Runs(options.out.absolute())
    lines = [f"| injury | injected | {' | '.join(VERDICTS)} |", f"| --- |{' ---: |' * (1 + len(VERDICTS))}"]
    for name in options.only or INJURIES:
        what, injure = INJURIES[name]
        count: Counter[str] = Counter()
        for number in range(round(COUNTS[name] * options.scale)):
            folder = runs.folder()
            done = injure(runs, folder, random.Random(f"{options.seed}/stock/{name}/{number}"))
            verdict, detail = runs.settle(folder)
            count[verdict] += 1
            print(f"{name:10} {verdict:9} {done}  {detail}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
        lines.append(f"| {what} | {count.total()} | {' | '.join(str(count[each]) for each in VERDICTS)} |")
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
