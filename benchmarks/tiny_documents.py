"""Compare the CPU seconds of `prepare` with datatrove's reader and tokenizer, on a file of very short documents.

    python -m benchmarks.tiny_documents --tokenizer TOKENIZER.json

Each contender runs in a separate process on FEW and on MANY documents, alternately, on one core; the difference is the
cost of the documents without a start. datatrove needs orjson (pip install orjson), which `prepare` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median

FEW, MANY = 10_000, 110_000
WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
folder, out, tokenizer = sys.argv[1:]
steps = [JsonlReader(folder, doc_progress=False), DocumentTokenizer(out, tokenizer_name_or_path=tokenizer)]
LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=out + "/logs").run()
"""


def write(folder: Path, documents: int) -> Path:
    """Write a folder with one file of documents of three to twelve words."""
    draw = random.Random(0)
    folder.mkdir()
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(documents):
            text = " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    return folder


def ours(folder: Path, out: Path, tokenizer: Path) -> list[str]:
    """Return the command of `prepare` that does the same work: no duplicates are looked for."""
    sources = f"sources={{mine: {{kind: jsonl, path: {folder}}}}}"
    spec = out.with_suffix(".yaml")
    spec.write_text(f"out: {out}\nduplicates: keep\nexecutor: {{workers: 1}}\n", encoding="utf-8")
    return ["-m", "modernbert_train", "prepare", str(spec), sources, f"tokenizer.path={tokenizer}"]


def cpu_seconds(words: list[str]) -> float:
    """Run a Python command; return the CPU seconds of it and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{words[:4]}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if find_spec("orjson") is None:
        raise SystemExit("error: datatrove reads JSON lines with orjson, which is not installed: pip install orjson")
    measured: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {number: write(Path(scratch, str(number)), number) for number in (FEW, MANY)}
        for turn in range(options.rounds):
            for number, folder in folders.items():
                out = Path(scratch, f"{number}-{turn}")
                theirs = ["-c", DATATROVE, str(folder), f"{out}-datatrove", str(options.tokenizer)]
                for name, words in (("prepare", ours(folder, out, options.tokenizer)), ("datatrove", theirs)):
                    measured.setdefault((name, number), []).append(cpu_seconds(words))
    spent = {key: median(seconds) for key, seconds in measured.items()}
    print(f"| CPU seconds, median of {options.rounds} | {FEW:,} documents | {MANY:,} | difference |")
    print("| --- | ---: | ---: | ---: |")
    cost = {}
    for name in ("prepare", "datatrove"):
        cost[name] = spent[name, MANY] - spent[name, FEW]
        print(f"| {name} | {spent[name, FEW]:.1f} | {spent[name, MANY]:.1f} | {cost[name]:.1f} |")
    print(f"prepare takes {cost['prepare'] / cost['datatrove']:.2f} times datatrove's CPU seconds a document")


if __name__ == "__main__":
    main()
