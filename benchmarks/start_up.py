"""How long `train` takes from the start of its process to the end of its first step, part by part.

    python -m benchmarks.start_up                        # this tree
    python -m benchmarks.start_up --tree ../before       # beside another tree, in turns
    python -m benchmarks.start_up --shards 243000 --documents 1600000000 --ranks 2 --rounds 1 --data big

The run is the quickstart's, on a data set made here; each start is a new process. Trees are other checkouts of this
project, run with this Python. Other work on the machine disturbs the clock more than the processor's time, and the
median more than the least.

With --shards the data set is what a run sees of a corpus of two trillion tokens (benchmarks/corpus.py), kept in --data
for the next time. Figures are those of the rank with the most of each; memory is what a process has of its own, without
files that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.corpus import write_corpus, write_index_of
from modernbert_train.data.dataset_card import CARD

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

def own_mb(process, kind):
    with open(f"/proc/{process}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(kind)) / 1024

def mark(name):
    handles = len(os.listdir("/proc/self/fd"))
    marks.append((name, time.time(), time.process_time(), own_mb("self", "Anonymous:"), handles))

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
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                workers = [own_mb(each, "Private_Dirty:") for each in file.read().split()]
            with open(sys.argv[1] + os.environ.get("RANK", "0"), "w") as file:
                told = {"marks": marks, "heavy": heavy, "modules": len(sys.modules), "workers": workers}
                json.dump(told, file)
            ranks = range(int(os.environ.get("WORLD_SIZE", 1)))
            while not all(os.path.exists(sys.argv[1] + str(rank)) for rank in ranks):  # each measures undisturbed
                time.sleep(0.05)
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


class Part(NamedTuple):
    """What a part of a start took, of the rank that took most.

    Attributes:
        seconds, cpu: by the clock, and of the processor.
        own_mb: memory of the process's own at its end.
        handles: files that are open at its end.
    """

    seconds: float
    cpu: float
    own_mb: float
    handles: float


Start = dict[str, Part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    parser.add_argument("--shards", type=int, help="of a corpus that is larger than the disk")
    parser.add_argument("--documents", type=int, default=1_600_000_000, help="of that corpus")
    parser.add_argument("--data", type=Path, help="where it is kept; 7 GB for 1.6 billion documents")
    options = parser.parse_args()
    trees = [*(tree.resolve() for tree in options.tree), ROOT]
    found: dict[Path, list[Start]] = {tree: [] for tree in trees}
    said: dict[Path, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), (options.data or Path(name) / "data").resolve()
        if options.shards is None:
            write_corpus(data, vocab_size=8192, tokens=200_000, median_tokens=300, longest=4000)
        elif not (data / "train" / CARD).exists():
            write_index_of(data, options.shards, options.documents, vocab_size=8192, median_tokens=900)
        for number in range(0 if options.shards else -1, options.rounds):  # at -1 the files come into the page cache
            for tree in trees:
                parts, said[tree] = start(tree, data, folder, f"start{number}-{trees.index(tree)}", options.ranks)
                if number >= 0:
                    found[tree].append(parts)
    for tree in trees:
        print(f"\n{tree}, {options.rounds} starts, {options.ranks} ranks; {said[tree]}")
        print(f"{'seconds':<12}{'least':>8}{'median':>8}{'cpu least':>11}{'median':>8}{'own MB':>9}{'handles':>9}")
        for part in (*PARTS, "all"):
            walls, cpus, own, handles = zip(*(parts[part] for parts in found[tree]), strict=True)
            figures = f"{min(walls):8.2f}{median(walls):8.2f}{min(cpus):11.2f}{median(cpus):8.2f}"
            print(f"{part:<12}{figures}{median(own):9.0f}{median(handles):9.0f}  {PARTS.get(part, '')}")


def start(tree: Path, data: Path, folder: Path, name: str, ranks: int) -> tuple[Start, str]:
    """One start: what each part took; and which of HEAVY were loaded at its end, and its workers' memory."""
    words = [
        str(tree / "yamls/quickstart.yaml"),
        *(f"data.train={data}/train", f"data.tokenizer={data}/tokenizer", "data.validation=null"),
        *(f"name={name}", f"runs_folder={folder}/runs", "compute.device=cpu", "distributed.timeout_seconds=900"),
    ]
    out = folder / f"{name}.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began, processes = time.time(), []
    for rank in range(ranks):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        several = {"MASTER_ADDR": "127.0.0.1"} | {key: str(value) for key, value in group.items()} if ranks > 1 else {}
        process = subprocess.Popen(
            [sys.executable, "-c", PROBE, str(out), json.dumps(HEAVY), *words],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)} | several,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
    texts = [process.communicate()[0] for process in processes]
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a data worker
    if not all(Path(f"{out}{rank}").exists() for rank in range(ranks)):  # a rank may hear of the end of another's
        sys.exit(f"{tree}: the run failed\n{texts[0]}")
    told = [json.loads(Path(f"{out}{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
    each = [_parts(one["marks"], began) for one in told]
    parts = {part: Part(*map(max, zip(*(one[part] for one in each), strict=True))) for part in each[0]}
    workers = max((one for each in told for one in each["workers"]), default=0.0)
    heavy = ", ".join(told[0]["heavy"]) or "none"
    return parts, f"a data worker has {workers:.0f} MB of its own; of {', '.join(HEAVY)} {heavy} loaded"


def _parts(marks: list[tuple[str, float, float, float, int]], began: float) -> Start:
    parts: Start = {}
    wall, cpu = began, 0.0
    for part, at, spent, own, handles in marks:
        parts[part] = Part(at - wall, spent - cpu, own, handles)
        wall, cpu = at, spent
    most = max(own for *_, own, _ in marks)
    parts["all"] = Part(wall - began, cpu, most, max(handles for *_, handles in marks))
    return parts


if __name__ == "__main__":
    main()
