"""One run on 1, 2 and 4 processes, and once more with a kill -9 every few steps: the losses in one picture.

    python data_prep/prepare.py yamls/data/quickstart.yaml out=data/quickstart-tiny tokenizer.vocab_size=2048
    OMP_NUM_THREADS=1 python -m benchmarks.one_line --data data/quickstart-tiny --out one-line

The run is small (4 layers, width 64, rows of 256 tokens, batches of 4 rows, a checkpoint in each step). On one process
the killed run must equal the uninterrupted one to the bit, or the command ends with 1; the difference with 2 and 4
processes is printed. Writes OUT/losses.json and OUT/one-line.svg; finished runs are not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.drill import warm
from modernbert_train.core.files import write_whole

SIZE = (
    "model={name: modernbert, vocab_size: 2048, hidden_size: 64, num_layers: 4, num_heads: 1, intermediate_size: 96,"
    " init_std: 0.05, attention_out_dropout: 0.0}",
    "optim.lr=1e-3",
    "phases.stable={tokens: 360_000, row_tokens: 256, batch_rows: 4, microbatch_tokens: 256, batch_warmup: null,"
    " schedule: {warmup_tokens: 20_000}}",
    "phases.context={tokens: 70_000, row_tokens: 512, batch_rows: 4, microbatch_tokens: 512}",
    "phases.decay={tokens: 100_000, row_tokens: 512, batch_rows: 4, microbatch_tokens: 512,"
    " schedule: {decay_tokens: 100_000}}",
    "data.num_workers=0",
    "eval.max_tokens=2_000",
    "checkpoint={interval_seconds: null, interval_steps: 1}",
)
COLOURS = {"1 process": "#c7d8ea", "2 processes": "#7fa6cc", "4 processes": "#3d75aa", "killed": "#b5432e"}


def losses_of(run: Path) -> list[float]:
    """Return the training loss of each recorded step."""
    file = run / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill
    return [entry["loss"] for entry in lines if entry.get("kind") == "step"]


def train(words: list[str], out: Path, name: str, ranks: int) -> list[float]:
    """Train to the end, or continue; return the losses."""
    process = start(words, out, name, ranks)
    if code := process.wait():
        sys.exit(f"{name}: exit code {code}; see {out / name}.txt")
    return losses_of(out / "runs" / name)


def start(words: list[str], out: Path, name: str, ranks: int) -> warm.Forked:
    return warm.start(
        ["train", *words, f"name={name}", f"runs_folder={out / 'runs'}"],
        out / f"{name}.txt",
        ranks=ranks,
        environment={"OMP_NUM_THREADS": "1"},
        hook=lambda: None,
    )


def killed_losses(words: list[str], out: Path, kills: int) -> tuple[list[float], list[int]]:
    """Kill the run one to three steps after each start, at a random moment; return the losses and the kills' steps."""
    name, draw = "killed", random.Random(7)
    record = out / "kills.json"
    kill_steps: list[int] = json.loads(record.read_text()) if record.exists() else []
    while len(kill_steps) < kills:
        process = start(words, out, name, 1)
        first = len(losses_of(out / "runs" / name))
        kill_after = first + draw.randint(1, 3)
        while process.poll() is None and len(losses_of(out / "runs" / name)) < kill_after:
            time.sleep(0.005)
        time.sleep(0.05 * draw.random())
        if process.poll() is not None:
            sys.exit(f"{name}: ended by itself after {len(kill_steps)} kills; see {out / name}.txt")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kill_steps.append(len(losses_of(out / "runs" / name)))
        write_whole(record, json.dumps(kill_steps))
    return train(words, out, name, 1), kill_steps


def picture(losses: dict[str, list[float]], kills: list[int], apart: float) -> str:
    """Draw all curves on top of each other as SVG, widest first, with a tick below for each kill."""
    width, height, left, top = 900, 300, 50, 20
    steps = len(next(iter(losses.values())))
    low, high = min(map(min, losses.values())), max(map(max, losses.values()))

    def x(step: float) -> float:
        return left + (width - left - 10) * step / steps

    def y(loss: float) -> float:
        return top + (height - top - 60) * (high - loss) / (high - low)

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for loss in range(int(low) + 1, int(high) + 1):
        svg.append(
            f'<path d="M{left} {y(loss):.1f}H{width - 10}" stroke="#eee"/><text x="{left - 8}" y="{y(loss) + 4:.1f}" '
            f'text-anchor="end" fill="#666">{loss}</text>'
        )
    for (name, values), stroke in zip(losses.items(), (11, 7, 4, 1.2), strict=True):
        points = " ".join(f"{x(step):.1f},{y(loss):.2f}" for step, loss in enumerate(values))
        svg.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="{stroke}" '
            'stroke-linejoin="round"/>'
        )
    for step in kills:
        svg.append(f'<path d="M{x(step):.1f} {height - 44}v8" stroke="{COLOURS["killed"]}" stroke-width="0.8"/>')
    names = [f"{name} ({len(kills)} times with kill -9, ticks)" if name == "killed" else name for name in losses]
    for name, label, at in zip(losses, names, accumulate((left, 110, 120, 120)), strict=True):
        svg.append(
            f'<rect x="{at}" y="{height - 24}" width="14" height="6" fill="{COLOURS[name]}"/>'
            f'<text x="{at + 20}" y="{height - 17}" fill="#333">{label}</text>'
        )
    svg.append(
        f'<text x="{width - 10}" y="{top + 8}" text-anchor="end" fill="#333">training loss over {steps} steps; '
        f"largest difference {apart:.1e}</text></svg>"
    )
    return "\n".join(svg) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train, validation and tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=200)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = [f"data.{part}={options.data.resolve() / part}" for part in ("train", "validation", "tokenizer")]
    words = [str(Path("yamls/quickstart.yaml").resolve()), *data, *SIZE]
    warm.prepare()
    losses = {f"{ranks} process{'es' * (ranks > 1)}": train(words, out, f"on-{ranks}", ranks) for ranks in (1, 2, 4)}
    losses["killed"], kills = killed_losses(words, out, options.kills)
    alone = losses["1 process"]
    differences = {
        name: max(abs(one - other) for one, other in zip(values, alone, strict=True)) for name, values in losses.items()
    }
    (out / "losses.json").write_text(json.dumps({"losses": losses, "kills": kills, "differences": differences}))
    (out / "one-line.svg").write_text(picture(losses, kills, max(differences.values())))
    for name, difference in differences.items():
        print(f"{name}: {len(losses[name])} steps, largest difference of a loss from 1 process {difference:.2g}")
    return 1 if differences["killed"] else 0


if __name__ == "__main__":
    sys.exit(main())
