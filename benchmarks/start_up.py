"""How long `train` takes from the start of its process to the end of its first step, part by part.

    python -m benchmarks.start_up                        # this tree
    python -m benchmarks.start_up --tree ../before       # beside another tree, in turns

The run is the quickstart's, on a data set made here; each start is a new process. Trees are other checkouts of this
project, run with this Python. Other work on the machine disturbs the clock more than the processor's time, and the
median more than the least.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from benchmarks.corpus import write_corpus

ROOT = Path(__file__).parents[1]
PARTS = {  # name -> what it is
    "check": "Python, configuration, data and folder checked",
    "imports": "torch, Composer and the rest; the place to start from found",
    "data": "the lengths of the documents read",
    "model": "the model without its weights",
    "trainer": "trainer, banner, first weights",
    "first batch": "planned and read, by a worker that starts",
    "first step": "forward, backward, update",
}
HEAVY = ("transformers", "sympy", "torch._dynamo")
# what the process runs: the program, with a mark at the end of each part; needs nothing of this tree
PROBE = """\
import json, os, sys, time

marks = []

def mark(name):
    marks.append((name, time.time(), time.process_time()))

def marked(name, call):
    def marking(*args, **kwargs):
        found = call(*args, **kwargs)
        mark(name)
        return found
    return marking

def ready():
    mark("imports")
    from composer import Callback
    from modernbert_train.train import build

    class Marks(Callback):
        def fit_start(self, state, logger):
            mark("trainer")
        def batch_start(self, state, logger):
            mark("first batch")
        def batch_end(self, state, logger):
            mark("first step")
            heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
            with open(sys.argv[1], "w") as file:
                json.dump({"marks": marks, "heavy": heavy, "modules": len(sys.modules)}, file)
            os._exit(0)

    accumulation = build.accumulation
    build.accumulation = lambda *given: [*accumulation(*given), Marks()]
    build.build_data = marked("data", build.build_data)
    build.build_model = marked("model", build.build_model)

def stage(text):
    if text.startswith("loading torch"):
        mark("check")
    if text.startswith("reading the lengths"):
        ready()

from modernbert_train.__main__ import main
from modernbert_train.run import progress

progress.stage = stage
sys.exit(main(["train", *sys.argv[3:]]))
"""
Times = dict[str, tuple[float, float]]  # part -> seconds, and those of the processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trees = [*(tree.resolve() for tree in options.tree), ROOT]
    found: dict[Path, list[Times]] = {tree: [] for tree in trees}
    loaded: dict[Path, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, vocab_size=8192, tokens=200_000, median_tokens=300, longest=4000)
        for number in range(-1, options.rounds):  # at -1 the files come into the page cache
            for tree in trees:
                times, loaded[tree] = start(tree, folder, f"start{number}-{trees.index(tree)}")
                if number >= 0:
                    found[tree].append(times)
    for tree in trees:
        print(f"\n{tree}, {options.rounds} starts; loaded by then: {loaded[tree]}")
        print(f"{'seconds':<12}{'least':>8}{'median':>8}{'cpu least':>11}{'median':>8}")
        for part in (*PARTS, "all"):
            walls, cpus = zip(*(times[part] for times in found[tree]), strict=True)
            about = PARTS.get(part, "")
            print(f"{part:<12}{min(walls):8.2f}{median(walls):8.2f}{min(cpus):11.2f}{median(cpus):8.2f}  {about}")


def start(tree: Path, data: Path, name: str) -> tuple[Times, str]:
    """One start: what each part took, and which of HEAVY were loaded at its end, with the number of modules."""
    words = [
        str(tree / "yamls/quickstart.yaml"),
        *(f"data.train={data}/train", f"data.tokenizer={data}/tokenizer", "data.validation=null"),
        *(f"name={name}", f"runs_folder={data}/runs", "compute.device=cpu"),
    ]
    out = data / f"{name}.json"
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, "-c", PROBE, str(out), json.dumps(HEAVY), *words],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said, _ = process.communicate()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a data worker
    if process.returncode != 0:
        sys.exit(f"{tree}: the run failed\n{said}")
    told = json.loads(out.read_text(encoding="utf-8"))
    times: Times = {}
    wall, cpu = began, 0.0
    for part, at, spent in told["marks"]:
        times[part] = (at - wall, spent - cpu)
        wall, cpu = at, spent
    times["all"] = (wall - began, cpu)
    return times, f"{', '.join(told['heavy']) or 'none'} of {', '.join(HEAVY)}; {told['modules']:,} modules"


if __name__ == "__main__":
    main()
