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
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modernbert_train.core.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks/expected_loss.json"
QUICKSTART = {"stable": 1_000_000, "context": 180_000, "decay": 460_000, "batch_warmup": 100_000, "warmup": 40_000}
WHOLE = 1_640_000  # tokens of the quickstart
TEXTS = {  # name -> vocabulary and source
    "stdlib": (8192, "source code of Python 3.11's standard library, as in yamls/data/quickstart.yaml"),
    "books": (4096, "English classics of Project Gutenberg, from the repositories of GITenberg, cut at chapters"),
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
CELLS = [Cell(text, *size, tokens) for tokens in TOKENS for size in SIZES for text in TEXTS]
CELLS.append(Cell("stdlib", 192, 7, 3, WHOLE, held_out=True))  # the quickstart itself


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="the books, .jsonl or .jsonl.zst")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/expected_loss", help="where runs and data stay")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    options = parser.parse_args(words)
    out = options.out.absolute()
    prepare_texts(options.text, out / "data")
    with ThreadPoolExecutor(options.jobs) as pool:
        for cell in pool.map(lambda cell: train_cell(cell, out), CELLS):
            print(cell, flush=True)
            write_table(out)


def prepare_texts(books: Path | None, out: Path) -> None:
    """Both texts as shards, where they are not yet."""
    for text, (vocabulary, _) in TEXTS.items():
        if (out / text / "train").is_dir():
            continue
        words = ["yamls/data/quickstart.yaml"] if text == "stdlib" else ["validation_share=0.05"]
        if text == "books":
            if books is None:
                raise SystemExit(f"--text: name the documents of {text}: {TEXTS[text][1]}.")
            words.append(f"sources={{books: {{kind: jsonl, path: '{books.absolute()}'}}}}")
        words += [f"out={out / text}", f"tokenizer.vocab_size={vocabulary}", "shard_bytes=1_048_576"]
        subprocess.run([sys.executable, "data_prep/prepare.py", *words], cwd=ROOT, check=True)


def train_cell(cell: Cell, out: Path) -> str:
    """Train a cell unless it is done; returns its name. What it used of the CPU is added up over starts."""
    used = out / f"{cell.name}.seconds"
    if (out / f"{cell.name}.json").exists():
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
    write_whole(out / f"{cell.name}.json", json.dumps(measured(cell, out)))
    return cell.name


def measured(cell: Cell, out: Path) -> dict[str, Any]:
    """A cell's row of the table, from what its run wrote."""
    lines = [json.loads(line) for line in (out / cell.name / "metrics.jsonl").read_text("utf-8").splitlines()]
    found = [line for line in lines if line["kind"] == "validation"]
    return {"name": cell.name, "validations": found, "cpu": float((out / f"{cell.name}.seconds").read_text())}


def write_table(out: Path) -> None:
    pass


if __name__ == "__main__":
    main()
