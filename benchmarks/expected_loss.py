"""Runs of several sizes on two texts, and the fit of the expected held-out loss to them.

    python -m benchmarks.expected_loss                          # constants and errors from the table; needs scipy
    python -m benchmarks.expected_loss --optim normuon --books books.jsonl.zst --out runs   # makes its runs first

Each run is `train yamls/quickstart.yaml` with an optimizer of OPTIMIZERS and another width, number of layers and number
of tokens, on one CPU thread; the same command continues. Warm-up, context and decay keep their shares of the tokens;
the batch stays. The first weights scale with 1 / sqrt(width) from the quickstart's 0.05 at a width of 192: with 0.05, a
width of 64 sits on the unigram plateau. Texts: Python's standard library with 8,192 entries, and English books with
4,096 (28 classics of Project Gutenberg from the repositories of GITenberg, public domain, cut at chapters, one document
a line). The runs are in expected_loss.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modernbert_train.config.load import load_run
from modernbert_train.core.files import write_whole
from modernbert_train.data.dataset_card import read_card
from modernbert_train.plan.expected_loss import ALPHA, FLOOR, effective_tokens
from modernbert_train.plan.parameters import count_parameters

Row = dict[str, Any]  # of the table
ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks/expected_loss.json"
OPTIMIZERS = {  # keys that differ from yamls/quickstart.yaml
    "stable_adamw": (),
    "normuon": ("optim.name=normuon", "optim.lr=4e-3", "optim.weight_decay=2e-4", "optim.cautious_decay=true"),
}
TEXTS = {"stdlib": 8192, "books": 4096, "few_books": 4096}  # name -> vocabulary; few_books: 4 % of the books, repeated
WHOLE = 1_640_000  # tokens of the quickstart
PHASES = {  # tokens of the quickstart
    "stable.tokens": 1_000_000,
    "stable.batch_warmup.tokens": 100_000,
    "stable.schedule.warmup_tokens": 40_000,
    "context.tokens": 180_000,
    "decay.tokens": 460_000,
    "decay.schedule.decay_tokens": 460_000,
}


@dataclass(frozen=True)
class Cell:
    """A run.

    Attributes:
        text: key of TEXTS.
        width, layers, heads: of the model.
        tokens: trained.
        held_out: not part of the fit.
    """

    text: str
    width: int
    layers: int
    heads: int
    tokens: int
    held_out: bool = False

    def name(self, optimizer: str) -> str:
        """Return the name of the run."""
        return f"{optimizer}-{self.text}-{self.width}x{self.layers}-{self.tokens // 1000}k"

    def command(self, optimizer: str, out: Path) -> list[str]:
        """Return the command of the run."""
        data = out / "data" / self.text
        keys: dict[str, Any] = {
            "name": self.name(optimizer),
            "runs_folder": out,
            **{f"data.{part}": data / part for part in ("train", "validation", "tokenizer")},
            "model.vocab_size": TEXTS[self.text],
            "model.hidden_size": self.width,
            "model.num_layers": self.layers,
            "model.num_heads": self.heads,
            "model.intermediate_size": self.width * 3 // 2,
            "model.init_std": round(0.05 * (192 / self.width) ** 0.5, 4),
            **{f"phases.{key}": tokens * self.tokens // WHOLE for key, tokens in PHASES.items()},
            "eval.max_tokens": 50_000,
            "eval.interval_tokens": self.tokens // 5,
            "compute.device": "cpu",
        }
        words = [f"{key}={value}" for key, value in keys.items()]
        yaml = str(ROOT / "yamls/quickstart.yaml")
        return [sys.executable, "-m", "modernbert_train", "train", yaml, *words, *OPTIMIZERS[optimizer]]


SIZES = ((64, 4, 1), (96, 4, 2), (160, 4, 2))
TOKENS = (400_000, 800_000, 1_600_000)
CELLS = [Cell(text, *size, tokens) for tokens in TOKENS for size in SIZES for text in ("stdlib", "books")]
CELLS.append(Cell("stdlib", 192, 7, 3, WHOLE, held_out=True))  # the quickstart itself
CELLS.append(Cell("few_books", *SIZES[1], TOKENS[-1], held_out=True))


def prepare_texts(books: Path, out: Path) -> None:
    """Write the shards of each text that is not there yet."""
    source = f"sources={{books: {{kind: jsonl, path: '{books.resolve()}'}}}}"
    words = {
        "stdlib": [str(ROOT / "yamls/data/quickstart.yaml")],
        "books": [source, "validation_share=0.05"],
        "few_books": [source, "validation_share=0.96", f"tokenizer.path={out / 'books/tokenizer'}"],
    }
    for text, own in words.items():
        if not (out / text / "train").is_dir():
            own += [f"out={out / text}", f"tokenizer.vocab_size={TEXTS[text]}", "shard_bytes=1_048_576"]
            subprocess.run([sys.executable, "-m", "modernbert_train", "prepare", *own], check=True)


def train_cell(cell: Cell, optimizer: str, out: Path) -> None:
    """Train a run that has no row in OUT yet, and write its row."""
    name = cell.name(optimizer)
    if (out / f"{name}.json").exists():
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (out / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(cell.command(optimizer, out), env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{out / name}.log: exit code {process.returncode}")
    row = measured(cell, optimizer, out) | {"cpu_seconds": round(usage.ru_utime + usage.ru_stime)}
    write_whole(out / f"{name}.json", json.dumps(row))
    shutil.rmtree(out / name)
    print(f"{name}: {row['loss']:.4f}", flush=True)


def measured(cell: Cell, optimizer: str, out: Path) -> Row:
    """Return a run's row of the table, from its record."""
    run = out / cell.name(optimizer)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    validations = [line for line in lines if line["kind"] == "validation"]
    config, last = load_run([run / "config.yaml"]), validations[-1]
    counted = count_parameters(config.model, config.objective)
    train, held_out = (read_card(out / "data" / cell.text / part) for part in ("train", "validation"))
    assert held_out.text_bytes is not None
    return {
        "optim": optimizer,
        "text": cell.text,
        "width": cell.width,
        "layers": cell.layers,
        "parameters": counted.active,
        "with_embedding": counted.total,
        "tokens": last["tokens"],
        "unique_tokens": min(train.tokens, last["tokens"]),
        "vocabulary": config.model.vocab_size,
        "loss": round(last["loss"], 4),
        "bits_per_byte": round(last["loss"] / math.log(2) * held_out.tokens / held_out.text_bytes, 4),
        "unigram_loss": round(last["unigram_loss"], 4),
        "held_out": cell.held_out,
        # tokens, steps, loss, unigram loss of each validation: rows get longer with the context phase
        "validations": [
            [v["tokens"], v["step"], round(v["loss"], 4), round(v["unigram_loss"], 4)] for v in validations
        ],
    }


def make_runs(optimizer: str, books: Path, out: Path, jobs: int) -> None:
    """Train all runs of an optimizer, and replace its rows of the table."""
    out.mkdir(parents=True, exist_ok=True)
    prepare_texts(books, out / "data")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda cell: train_cell(cell, optimizer, out), CELLS))
    own = [json.loads((out / f"{cell.name(optimizer)}.json").read_text("utf-8")) for cell in CELLS]
    table = json.loads(TABLE.read_text("utf-8"))
    rows = [json.dumps(row) for row in [*(row for row in table["runs"] if row["optim"] != optimizer), *own]]
    write_whole(TABLE, f'{{"texts": {json.dumps(table["texts"])},\n"runs": [\n' + ",\n".join(rows) + "\n]}\n")


def read_table(optimizer: str) -> list[Row]:
    """Return the committed runs of an optimizer."""
    rows: list[Row] = json.loads(TABLE.read_text("utf-8"))["runs"]
    return [row for row in rows if row["optim"] == optimizer]


@dataclass(frozen=True)
class Law:
    """Constants of the rule in one unit of the loss.

    Attributes:
        unit: unigram (loss over unigram loss) or bits (per byte).
        count: which parameters: key of a row.
        values: size, data and beta of plan/expected_loss.py, in that unit.
    """

    unit: str
    count: str
    values: tuple[float, float, float]

    def loss(self, row: Row) -> float:
        """Return the expected loss of a run, in nats per token."""
        size, data, beta = self.values
        tokens = effective_tokens(row["tokens"], row["unique_tokens"])
        share = size / (row[self.count] / 1e6) ** ALPHA + data / (tokens / 1e6) ** beta
        return (FLOOR * floor_of(self.unit) + share) * nats_of(self.unit, row)


def nats_of(unit: str, row: Row) -> float:
    """Return how many nats per token one unit of the loss is."""
    return float(row["unigram_loss"] if unit == "unigram" else row["loss"] / row["bits_per_byte"])


def floor_of(unit: str) -> float:
    """Return the factor from FLOOR, a share of the unigram loss (about 2.6 bits a byte in both texts), to a unit."""
    return 1.0 if unit == "unigram" else 2.6


def fit(rows: Sequence[Row], unit: str = "unigram", count: str = "parameters") -> Law:
    """Fit the loss by least squares, each in nats over its unit."""
    from scipy.optimize import least_squares

    losses = np.array([row["loss"] / nats_of(unit, row) for row in rows])

    def errors(values: Any) -> Any:
        law = Law(unit, count, tuple(values))
        return np.array([law.loss(row) / nats_of(unit, row) for row in rows]) - losses

    solution = least_squares(errors, (0.1, 0.5, 0.3), bounds=([0.0, 0.0, 0.02], [5.0, 10.0, 2.0]), xtol=1e-12)
    return Law(unit, count, tuple(solution.x.tolist()))


def left_out(rows: Sequence[Row], unit: str, count: str) -> tuple[list[float], list[float]]:
    """Return errors in nats of each run by a fit without it, and by a fit without its text."""
    without_run = [fit([r for r in rows if r is not row], unit, count).loss(row) - row["loss"] for row in rows]
    of_text = {text: fit([r for r in rows if r["text"] != text], unit, count) for text in {r["text"] for r in rows}}
    return without_run, [of_text[row["text"]].loss(row) - row["loss"] for row in rows]


def print_fit(optimizer: str) -> None:
    """Print the committed constants of an optimizer and their uncertainty."""
    rows = read_table(optimizer)
    print(f"{optimizer}: {len(rows)} runs")
    inside = [row for row in rows if not row["held_out"]]
    for count in ("parameters", "with_embedding"):
        for unit in ("unigram", "bits"):
            run, text = left_out(inside, unit, count)
            print(f"{unit:8} {count:15} without the run {_errors(run)}; without the text {_errors(text)}")
    law = fit(inside)
    print("size, data, beta = " + ", ".join(f"{value:.4f}" for value in law.values))
    every = [
        abs(error) / row["unigram_loss"]
        for errors in left_out(inside, "unigram", "parameters")
        for error, row in zip(errors, inside, strict=True)
    ]
    print(f"residual: nine of ten left out are within {np.quantile(every, 0.9):.4f} of the unigram loss")
    for name, far in (
        ("most tokens", lambda row: row["tokens"] > 1_500_000),
        ("widest", lambda row: row["width"] >= 160),
    ):
        near = fit([row for row in inside if not far(row)])
        errors = [(near.loss(row) - row["loss"]) / row["unigram_loss"] for row in inside if far(row)]
        print(f"extrapolated to the {name}: " + ", ".join(f"{error:+.3f}" for error in errors) + " of the unigram loss")
    for row in rows:
        if row["held_out"]:
            print(
                f"held out, {row['width']} x {row['layers']}, {row['text']}: {law.loss(row):.3f}, was {row['loss']:.3f}"
            )
    print(
        "highest above the rule at a validation: " + f"{max(excess(law, row) for row in rows):+.4f} of the unigram loss"
    )


def excess(law: Law, row: Row) -> float:
    """Return a run's highest excess over the rule at validations from 400,000 tokens on, over the unigram loss."""
    return max(
        (loss - law.loss(row | {"tokens": tokens, "unigram_loss": unigram})) / unigram
        for tokens, _, loss, unigram in row["validations"]
        if tokens >= 400_000
    )


def _errors(errors: Sequence[float]) -> str:
    return f"{np.sqrt(np.mean(np.square(errors))):.3f}, at most {np.max(np.abs(errors)):.3f} nats"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optim", choices=sorted(OPTIMIZERS), help="one optimizer; else all of the table")
    parser.add_argument("--books", type=Path, help="make the runs first, with these documents")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/expected_loss", help="folder of the runs and shards")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    options = parser.parse_args()
    if options.books is not None:
        if options.optim is None:
            parser.error("--books needs --optim: the optimizer of the runs")
        make_runs(options.optim, options.books, options.out.resolve(), options.jobs)
    for optimizer in filter(read_table, OPTIMIZERS) if options.optim is None else [options.optim]:
        print_fit(optimizer)


if __name__ == "__main__":
    main()
