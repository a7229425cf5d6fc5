"""Runs of the quickstart's recipe in several sizes on two texts: the table that `plan/expected_loss.py` is fitted to.

    python -m benchmarks.expected_loss --text 'books/*.jsonl.zst'    # again to go on: cells that are done stay
    python -m benchmarks.expected_loss --fit                         # constants and errors from the committed table

Each cell is `python -m modernbert_train train yamls/quickstart.yaml` with another width, number of layers and number of
tokens, on one CPU thread. Warm-up, context and decay keep their shares of the tokens; the learning rate and the batch
stay. The first weights scale with 1 / sqrt(width) from the quickstart's 0.05 at a width of 192: with 0.05, a width of
64 sits on the unigram plateau. Texts: Python's standard library with 8,192 entries, and English books with 4,096
(`--text`: 28 classics of Project Gutenberg from the repositories of GITenberg, public domain, cut at chapters, one
document a line).
"""

from __future__ import annotations

import argparse
import json
import math
import os
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

Row = dict[str, Any]  # of the table, see `measured`
ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks/expected_loss.json"
QUICKSTART = {"stable": 1_000_000, "context": 180_000, "decay": 460_000, "batch_warmup": 100_000, "warmup": 40_000}
WHOLE = 1_640_000  # tokens of the quickstart
BOOKS = "English classics of Project Gutenberg, from the repositories of GITenberg, cut at chapters"
TEXTS = {  # name -> vocabulary and source
    "stdlib": (8192, "source code of Python 3.11's standard library, as in yamls/data/quickstart.yaml"),
    "books": (4096, BOOKS),
    "few_books": (4096, f"{BOOKS}; a twenty-fifth of them, to be read again and again"),
}


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        text: key of TEXTS.
        width, layers, heads: of the model.
        tokens: to train.
        held_out: no part of the fit.
    """

    text: str
    width: int
    layers: int
    heads: int
    tokens: int
    held_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.text}-{self.width}x{self.layers}-{self.tokens // 1000}k"

    def command(self, data: Path, runs: Path) -> list[str]:
        """The run in words that a shell takes."""
        tokens = {part: count * self.tokens // WHOLE for part, count in QUICKSTART.items()}
        keys: dict[str, Any] = {
            "name": self.name,
            "runs_folder": runs,
            **{f"data.{part}": data / self.text / part for part in ("train", "validation", "tokenizer")},
            "model.vocab_size": TEXTS[self.text][0],
            "model.hidden_size": self.width,
            "model.num_layers": self.layers,
            "model.num_heads": self.heads,
            "model.intermediate_size": self.width * 3 // 2,
            "model.init_std": round(0.05 * (192 / self.width) ** 0.5, 4),
            "phases.stable.tokens": tokens["stable"],
            "phases.stable.batch_warmup.tokens": tokens["batch_warmup"],
            "phases.stable.schedule.warmup_tokens": tokens["warmup"],
            "phases.context.tokens": tokens["context"],
            "phases.decay.tokens": tokens["decay"],
            "phases.decay.schedule.decay_tokens": tokens["decay"],
            "eval.max_tokens": 50_000,
            "eval.interval_tokens": self.tokens // 5,
            "eval.samples": 0,
            "compute.device": "cpu",
            "logging.progress_bar": "false",
        }
        given = [f"{key}={value}" for key, value in keys.items()]
        return [sys.executable, "-m", "modernbert_train", "train", "yamls/quickstart.yaml", *given]


SIZES = ((64, 4, 1), (96, 4, 2), (160, 4, 2))
TOKENS = (400_000, 800_000, 1_600_000)
CELLS = [Cell(text, *size, tokens) for tokens in TOKENS for size in SIZES for text in ("stdlib", "books")]
CELLS.append(Cell("stdlib", 192, 7, 3, WHOLE, held_out=True))  # the quickstart itself
CELLS.append(Cell("few_books", *SIZES[1], TOKENS[-1], held_out=True))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="the books, .jsonl or .jsonl.zst")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/expected_loss", help="where runs and data stay")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--fit", action="store_true", help="train nothing; needs scipy")
    options = parser.parse_args(words)
    if options.fit:
        return print_fit()
    out = options.out.absolute()
    prepare_texts(options.text, out / "data")
    with ThreadPoolExecutor(options.jobs) as pool:
        for cell in pool.map(lambda cell: train_cell(cell, out), CELLS):
            print(cell, flush=True)
            write_table(out)


def prepare_texts(books: Path | None, out: Path) -> None:
    """All texts as shards, where they are not yet."""
    for text, (vocabulary, source) in TEXTS.items():
        if (out / text / "train").is_dir():
            continue
        words = [f"out={out / text}", f"tokenizer.vocab_size={vocabulary}", "shard_bytes=1_048_576"]
        if text == "stdlib":
            words.insert(0, "yamls/data/quickstart.yaml")
        elif books is None:
            raise SystemExit(f"--text: name the documents of {text}: {source}.")
        else:
            words.append(f"sources={{books: {{kind: jsonl, path: '{books.absolute()}'}}}}")
            few = text == "few_books"
            words += (
                ["validation_share=0.96", f"tokenizer.path={out / 'books/tokenizer'}"]
                if few
                else ["validation_share=0.05"]
            )
        subprocess.run([sys.executable, "data_prep/prepare.py", *words], cwd=ROOT, check=True)


def train_cell(cell: Cell, out: Path) -> str:
    """Train a cell unless it is done; returns its name. What it used of the CPU is added up over starts."""
    used = out / f"{cell.name}.seconds"
    if (out / f"{cell.name}.done").exists():
        return cell.name
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (out / f"{cell.name}.log").open("ab") as log:
        process = subprocess.Popen(
            cell.command(out / "data", out), cwd=ROOT, env=one_thread, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    before = float(used.read_text()) if used.exists() else 0.0
    write_whole(used, str(before + usage.ru_utime + usage.ru_stime))
    if process.returncode != 0:
        raise SystemExit(f"{out / cell.name}.log: the run ended with {process.returncode}.")
    write_whole(out / f"{cell.name}.done", "")
    return cell.name


def measured(cell: Cell, out: Path) -> dict[str, Any]:
    """A cell's row of the table, from what its run wrote."""
    lines = [json.loads(line) for line in (out / cell.name / "metrics.jsonl").read_text("utf-8").splitlines()]
    found = [line for line in lines if line["kind"] == "validation"]
    config = load_run([out / cell.name / "config.yaml"])
    counted = count_parameters(config.model, config.objective)
    train, held_out = (read_card(out / "data" / cell.text / part) for part in ("train", "validation"))
    last = found[-1]
    bits = None
    if held_out.text_bytes is not None:
        bits = round(last["loss"] / math.log(2) * held_out.tokens / held_out.text_bytes, 4)
    return {
        "text": cell.text,
        "width": cell.width,
        "layers": cell.layers,
        "parameters": counted.active,
        "with_embedding": counted.total,
        "tokens": last["tokens"],
        "unique_tokens": min(train.tokens, last["tokens"]),
        "vocabulary": config.model.vocab_size,
        "loss": round(last["loss"], 4),
        "bits_per_byte": bits,
        "unigram_loss": round(last["unigram_loss"], 4),
        "cpu_seconds": round(float((out / f"{cell.name}.seconds").read_text())),
        "held_out": cell.held_out,
        # tokens, steps, loss, unigram loss of each validation: rows get longer with the context phase
        "validations": [[v["tokens"], v["step"], round(v["loss"], 4), round(v["unigram_loss"], 4)] for v in found],
    }


def write_table(out: Path) -> None:
    """All cells that are done, a line each."""
    rows = [json.dumps(measured(cell, out)) for cell in CELLS if (out / f"{cell.name}.done").exists()]
    texts = json.dumps({name: source for name, (_, source) in TEXTS.items()})
    write_whole(TABLE, f'{{"texts": {texts},\n"runs": [\n' + ",\n".join(rows) + "\n]}\n")


def read_table() -> list[Row]:
    """The committed runs."""
    rows: list[Row] = json.loads(TABLE.read_text("utf-8"))["runs"]
    return rows


@dataclass(frozen=True)
class Law:
    """Constants of the rule in one unit of the loss.

    Attributes:
        unit: unigram (loss over unigram loss) or bits (per byte).
        count: which parameters: key of a row.
        values: SIZE, DATA and BETA of plan/expected_loss.py, in that unit.
    """

    unit: str
    count: str
    values: tuple[float, float, float]

    def loss(self, row: Row) -> float:
        """Of a run, in nats per token."""
        size, data, beta = self.values
        tokens = effective_tokens(row["tokens"], row["unique_tokens"])
        share = size / (row[self.count] / 1e6) ** ALPHA + data / (tokens / 1e6) ** beta
        return (FLOOR * floor_of(self.unit) + share) * nats_of(self.unit, row)


def nats_of(unit: str, row: Row) -> float:
    """Nats per token that are one of the unit."""
    return float(row["unigram_loss"] if unit == "unigram" else row["loss"] / row["bits_per_byte"])


def floor_of(unit: str) -> float:
    """What FLOOR, a share of the unigram loss, is multiplied with: the two texts have about 2.6 bits a byte of it."""
    return 1.0 if unit == "unigram" else 2.6


def fit(rows: Sequence[Row], unit: str = "unigram", count: str = "parameters") -> Law:
    """Least squares of the loss, each in nats over its unit."""
    from scipy.optimize import least_squares

    wanted = np.array([row["loss"] / nats_of(unit, row) for row in rows])

    def errors(values: Any) -> Any:
        law = Law(unit, count, tuple(values))
        return np.array([law.loss(row) / nats_of(unit, row) for row in rows]) - wanted

    found = least_squares(errors, (0.1, 0.5, 0.3), bounds=([0.0, 0.0, 0.02], [5.0, 10.0, 2.0]), xtol=1e-12)
    return Law(unit, count, tuple(found.x.tolist()))


def left_out(rows: Sequence[Row], unit: str, count: str) -> tuple[list[float], list[float]]:
    """Errors in nats of each run by a fit without it, and by a fit without its text."""
    without_run = [fit([r for r in rows if r is not row], unit, count).loss(row) - row["loss"] for row in rows]
    of_text = {text: fit([r for r in rows if r["text"] != text], unit, count) for text in {r["text"] for r in rows}}
    return without_run, [of_text[row["text"]].loss(row) - row["loss"] for row in rows]


def print_fit() -> None:
    """The constants that are committed, and how far they can be trusted."""
    rows = read_table()
    inside = [row for row in rows if not row["held_out"]]
    for count in ("parameters", "with_embedding"):
        for unit in ("unigram", "bits"):
            run, text = left_out(inside, unit, count)
            print(f"{unit:8} {count:15} without the run {_errors(run)}; without the text {_errors(text)}")
    law = fit(inside)
    print("SIZE, DATA, BETA = " + ", ".join(f"{value:.4f}" for value in law.values))
    every = [
        abs(error) / row["unigram_loss"]
        for errors in left_out(inside, "unigram", "parameters")
        for error, row in zip(errors, inside, strict=True)
    ]
    print(f"RESIDUAL: nine of ten left out are within {np.quantile(every, 0.9):.4f} of the unigram loss")
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
    """Of a run's validations from 400,000 tokens on: the highest above the rule, over the unigram loss."""
    return max(
        (loss - law.loss(row | {"tokens": tokens, "unigram_loss": unigram})) / unigram
        for tokens, _, loss, unigram in row["validations"]
        if tokens >= 400_000
    )


def _errors(errors: Sequence[float]) -> str:
    return f"{np.sqrt(np.mean(np.square(errors))):.3f}, at most {np.max(np.abs(errors)):.3f} nats"


if __name__ == "__main__":
    main()
