"""One small run, cut in every way: how far losses, gradients and weights are from those of one process.

    python -m benchmarks.invariance                       # some minutes on two CPU cores; ranks are processes with gloo
    python -m benchmarks.invariance --data data/own_text  # on other text, with a vocabulary of at most 8,192

The first row is the floor: the same run on one process that only adds in another order, by using two threads. Weights
are compared by their distance, over the distance that training has moved them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.prepare import main as prepare
from modernbert_train.config.load import load_run
from modernbert_train.models.init import initialize
from modernbert_train.run.checkpoint import newest_valid
from modernbert_train.train.build import build_model

ROOT = Path(__file__).resolve().parent.parent
BASE = (
    "compute.device=cpu",
    "model={hidden_size: 128, num_layers: 4, num_heads: 2, intermediate_size: 192}",
    "phases.context=null",
    "phases.decay=null",
    "checkpoint.interval_seconds=null",
    "checkpoint.interval_steps=10",
    "checkpoint.keep=100",
    "logging.progress_bar=false",
    "data.num_workers=0",
)
HSDP = ("distributed.strategy=hsdp", "distributed.shard_ranks=2")
# a row: what it says, then ranges of (ranks, threads, words), each of which goes on from the middle of the last
StepRange = tuple[int, int, tuple[str, ...]]
REFERENCE: StepRange = (1, 1, ())
CUTS: dict[str, list[StepRange]] = {
    "1 process, two threads": [(1, 2, ())],
    "microbatches of 1 row": [(1, 1, ("phases.stable.microbatch_tokens=128",))],
    "microbatches of 16 rows, the whole batch": [(1, 1, ("phases.stable.microbatch_tokens=2048",))],
    "2 ranks, DDP": [(2, 1, ())],
    "4 ranks, DDP": [(4, 1, ())],
    "2 ranks, FSDP2": [(2, 1, ("distributed.strategy=fsdp2",))],
    "4 ranks, FSDP2": [(4, 1, ("distributed.strategy=fsdp2",))],
    "4 ranks, HSDP 2 x 2": [(4, 1, HSDP)],
    "1 process, from the middle on 4 ranks, HSDP": [(1, 1, ()), (4, 1, HSDP)],
    "4 ranks, HSDP, from the middle on 2, DDP": [(4, 1, HSDP), (2, 1, ())],
}
DROPOUT_CUTS = ("1 process, two threads", "2 ranks, DDP", "4 ranks, FSDP2", "4 ranks, HSDP 2 x 2")
DROPOUT = ("model.attention_out_dropout=0.1",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data/quickstart", help="prepared text")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    data: Path = options.data
    if not data.is_dir():
        data = folder / "data"
        assert prepare([str(ROOT / "yamls/data/quickstart.yaml"), f"out={data}"]) == 0
    try:
        rows = measure(folder, data, options.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    columns = ("loss, largest relative difference", "gradient norm, the same", "weights")
    print(f"\n| {options.steps} steps of 16 rows of 128 | {' | '.join(columns)} |")
    print("| --- | --- | --- | --- |")
    print("\n".join(rows))


def measure(folder: Path, data: Path, steps: int) -> list[str]:
    """A markdown row for each cut."""
    rows = []
    for extra, names, note in (((), tuple(CUTS), ""), (DROPOUT, DROPOUT_CUTS, "; dropout 0.1")):
        words = [*words_of(folder, data, steps), *extra]
        expected = run(folder, f"reference{len(extra)}", words, [REFERENCE], steps)
        start = first_weights(words)
        for number, name in enumerate(names):
            found = run(folder, f"cut{len(extra)}-{number}", words, CUTS[name], steps)
            cells = [f"{largest(found, expected, key):.1e}" for key in ("loss", "grad_norm")]
            moved = distance(weights(expected), start)
            rows.append(
                f"| {name}{note} | {' | '.join(cells)} | {distance(weights(found), weights(expected)) / moved:.1e} |"
            )
            print(rows[-1], flush=True)
    return rows


def words_of(folder: Path, data: Path, steps: int) -> list[str]:
    tokens = round(steps * 2048 * 0.97)
    phase = f"tokens: {tokens}, row_tokens: 128, batch_rows: 16, microbatch_tokens: 256, batch_warmup: null"
    schedule = f"schedule: {{warmup_tokens: {tokens // 10}, decay_tokens: {tokens // 3}}}"
    return [
        str(ROOT / "yamls/quickstart.yaml"),
        *(f"data.{part}={data / part}" for part in ("train", "validation", "tokenizer")),
        f"runs_folder={folder}",
        f"phases.stable={{{phase}, {schedule}}}",
        *BASE,
    ]


def run(folder: Path, name: str, words: Sequence[str], ranges: Sequence[StepRange], steps: int) -> Path:
    """Train a run through the launcher, each range but the first from the middle of the one before."""
    for number, (ranks, threads, more) in enumerate(ranges):
        if number:
            for path in (folder / name / "checkpoints").iterdir():
                if int(path.name.removeprefix("step-")) > steps // 2:
                    shutil.rmtree(path)
        command = [sys.executable, str(ROOT / "launch/run.py"), *words, f"name={name}", *more, "--ranks", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
    return folder / name


def records(run: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if entry["kind"] == "step"]


def largest(found: Path, expected: Path, key: str) -> float:
    """Largest relative difference over all steps."""
    pairs = zip(records(found), records(expected), strict=True)
    return max(abs(one[key] - other[key]) / abs(other[key]) for one, other in pairs)


def weights(run: Path) -> dict[str, Tensor]:
    checkpoint, _ = newest_valid(run / "checkpoints")
    assert checkpoint is not None
    return checkpoint.weights()


def first_weights(words: Sequence[str]) -> dict[str, Tensor]:
    config = load_run(words[:1], words[1:])
    model = build_model(config, sharded=False)
    initialize(model, config.modernbert, config.seed)
    return dict(model.named_parameters())


@torch.no_grad()
def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of all weights as one vector."""
    return float(sum((one[name].double() - other[name].double()).square().sum() for name in one)) ** 0.5


if __name__ == "__main__":
    main()
