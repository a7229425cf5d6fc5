"""Held-out loss of a larger model that grew out of a trained smaller one, beside a random start over the same tokens.

    python -m benchmarks.growth                              # nine minutes on one CPU core
    python -m benchmarks.growth --seeds 5 --svg growth.svg   # more seeds, and the curves as a picture

The text is the quickstart's (Python's standard library), prepared first if data/quickstart is not there. One small
model (width 128, 4 layers) is trained; then, for each seed, larger ones (width 192, 7 layers, the quickstart's size)
from random weights and grown in both modes. A seed decides the random weights, the order of the text and the masks, and
is shared by the starts; all see the same batches at the same rate. The width grows by half a head on each side, so the
published mode cuts heads here, which it does not at base to large.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Literal

from data_prep.prepare import main as prepare
from modernbert_train.config.load import load_run
from modernbert_train.report.chart import Chart, Line, Marks, standalone
from modernbert_train.train.session import train

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("model.hidden_size=128", "model.num_layers=4", "model.num_heads=2", "model.intermediate_size=192")
STARTS = {"random": (), "grown, paper": ("paper",), "grown, fitted": ("fitted",)}
KINDS: dict[str, Literal["dashed", "faint", "main"]] = {
    "random": "dashed",
    "grown, paper": "faint",
    "grown, fitted": "main",
}
POINTS = 6  # held-out measurements of each run


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        first: loss of the first batch, before any step; 30 % of its tokens are masked.
        held_out: held-out loss at POINTS equal distances, 15 % masked.
    """

    first: float
    held_out: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small-tokens", type=int, default=600_000, help="tokens the small model is trained on")
    parser.add_argument("--tokens", type=int, default=120_000, help="tokens each larger model is trained on")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--svg", type=Path, help="write the curves here")
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after Composer's own, which still draws reports there
    data = ROOT / "data/quickstart"
    if not data.is_dir():
        data = folder / "data"
        assert prepare([str(ROOT / "yamls/data/quickstart.yaml"), f"out={data}"]) == 0
    small = run(folder, data, "small", 1, options.small_tokens, SMALL)
    runs: dict[str, list[Measured]] = {start: [] for start in STARTS}
    for seed in range(2, 2 + options.seeds):
        for start, mode in STARTS.items():
            grown = (f"weights.grow_from={folder / 'runs/small'}", *(f"weights.grow_mode={word}" for word in mode))
            words = grown if mode else ()
            runs[start].append(run(folder, data, f"{start}-{seed}".replace(", ", "-"), seed, options.tokens, words))
    print(
        f"\nheld-out loss in nats, mean of {options.seeds} seeds (lowest to highest); the small model reached "
        f"{small.held_out[-1]:.2f} in {options.small_tokens:,} tokens\n"
    )
    print(table(runs, options.tokens))
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes")
    if options.svg is not None:
        options.svg.write_text(picture(runs, options.tokens, small.held_out[-1]), encoding="utf-8")


def run(folder: Path, data: Path, name: str, seed: int, tokens: int, words: tuple[str, ...]) -> Measured:
    """Train one run at a constant rate."""
    config = load_run(
        [ROOT / "yamls/quickstart.yaml"],
        [
            f"name={name}",
            f"runs_folder={folder / 'runs'}",
            f"seed={seed}",
            *(f"data.{part}={data / part}" for part in ("train", "validation", "tokenizer")),
            "phases.context=null",
            "phases.decay=null",
            f"phases.stable.tokens={tokens}",
            "phases.stable.batch_warmup=null",
            "phases.stable.schedule={warmup_tokens: 20_000}",
            f"eval.interval_tokens={tokens // POINTS}",
            "checkpoint.interval_seconds=null",
            "logging.progress_bar=false",
            *words,
        ],
    )
    train(config)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses: dict[str, list[float]] = {"start": [], "step": [], "validation": []}
    for entry in map(json.loads, lines):
        losses[entry["kind"]].append(entry.get("loss"))
    return Measured(losses["step"][0], losses["validation"][:POINTS])


def table(runs: dict[str, list[Measured]], tokens: int) -> str:
    """Markdown: a start a row, a measurement a column."""
    at = [f"{tokens * (point + 1) // POINTS:,}" for point in range(POINTS)]
    rows = [f"| start | first batch | {' | '.join(at)} |", "| --- |" + " --- |" * (POINTS + 1)]
    for start, measured in runs.items():
        columns = [[one.first for one in measured]]
        columns += [[one.held_out[point] for one in measured] for point in range(POINTS)]
        cells = [f"{mean(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in columns]
        rows.append(f"| {start} | {' | '.join(cells)} |")
    return "\n".join(rows)


def picture(runs: dict[str, list[Measured]], tokens: int, small_loss: float) -> str:
    """The means as curves, in an SVG file."""
    x = [tokens * (point + 1) / POINTS for point in range(POINTS)]
    lines = []
    for start, measured in runs.items():
        y = [mean(one.held_out[point] for one in measured) for point in range(POINTS)]
        lines.append(Line(f"{start}, mean of {len(measured)} seeds", KINDS[start], x, y))
    lines.append(Line("the small model", "points", [0.0], [small_loss]))
    chart = Chart("Held-out loss after growing", lines, lambda value: f"{value:.3f} nats", lambda value: f"{value:g}")
    style = files("modernbert_train.report").joinpath("chart.css").read_text(encoding="utf-8")
    return standalone(chart, Marks(float(tokens)), "width 128, 4 layers to width 192, 7 layers", style)


if __name__ == "__main__":
    main()
