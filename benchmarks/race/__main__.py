"""Run the race of protocol.yaml, in pieces: the same command continues.

    python -m benchmarks.race --text FOLDER --out race --hours 2
    python -m benchmarks.race --text FOLDER --judge FOLDER --out race    # the finalists on suite.yaml too
    python -m benchmarks.race --out race --table                         # the table and the picture so far

OUT/results.jsonl gets a line for each finished run, whose folder is then removed; a run that was killed resumes from
its checkpoint. The rest is below 100 MB, so OUT without OUT/data can be moved to another machine, where --text
makes the same data. A run that diverges is a result. About four hours of two quiet cores with --jobs 2. Finished
runs are in benchmarks/race/results.jsonl: with a copy of it in an empty OUT, the command runs only the others.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.race.protocol import HERE, Job, Protocol, configure
from benchmarks.race.table import finalists_of, read_results, write_table
from modernbert_train.core.files import write_whole

MODULE = [sys.executable, "-m", "modernbert_train"]
STOPPED = 75  # exit code of a run that a signal stopped
REFUSED = (64, 65, 74, 78)  # exit codes for arguments, data, disk, configuration: not a result of an arm
Row = dict[str, Any]


class Race:
    """The folder of a race: its protocol, its data, and a line of results for each finished run."""

    def __init__(self, protocol: Protocol, out: Path, hours: float) -> None:
        self.protocol, self.out, self.ends = protocol, out.resolve(), time.monotonic() + 3600 * hours
        self.out.mkdir(parents=True, exist_ok=True)
        seal = self.out / "protocol.sha256"
        if seal.exists() and seal.read_text() != protocol.sha256:
            raise SystemExit(f"{out}: of another protocol ({seal.read_text()[:12]}, now {protocol.sha256[:12]}). "
                             "Race into an empty folder, or restore that protocol.")  # fmt: skip
        write_whole(seal, protocol.sha256)
        self.file = self.out / "results.jsonl"

    def results(self) -> dict[str, Row]:
        """Return the finished runs by name."""
        return read_results(self.file)

    def add(self, row: Row) -> None:
        """Append a result; a torn last line is ended first."""
        torn = self.file.exists() and not self.file.read_bytes().endswith(b"\n")
        with self.file.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(row) + "\n")

    @property
    def data(self) -> Path:
        """Prepared shards."""
        return self.out / "data"

    def prepare(self, texts: list[Path]) -> None:
        """Make the shards; the race refuses to continue on others."""
        sources = {path.name.split(".")[0]: {"kind": "jsonl", "path": str(path.resolve())} for path in texts}
        tree = self.protocol.tree
        own = {key: tree[key] for key in ("tokenizer", "validation_share")}
        spec = {"out": str(self.data), "sources": sources, **own}
        (self.out / "data.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
        if not self.data.exists():
            run(["prepare", str(self.out / "data.yaml")], self.out / "prepare.log", check=True)
        facts = [
            json.loads((self.data / part / "dataset.json").read_text())["index_sha256"]
            for part in ("train", "validation")
        ]
        record = self.out / "data.json"
        if record.exists() and json.loads(record.read_text()) != facts:
            raise SystemExit(
                f"{self.data}: not the shards that this race began with. Remove it, and give the same --text."
            )
        write_whole(record, json.dumps(facts))

    def train(self, job: Job) -> Row | None:
        """Train a job to its end and keep its figures; None if the time is over or a signal stopped it."""
        if (result := self.results().get(job.name)) is not None:
            return result
        if time.monotonic() > self.ends:
            return None
        runs, file = self.out / "runs", self.out / f"{job.name}.yaml"
        counted = configure(self.protocol, job, self.data, runs, file)
        code = run(["train", str(file)], self.out / f"{job.name}.log", seconds=self.ends - time.monotonic())
        if code == STOPPED or code < 0:
            return None
        metrics = runs / job.name / "metrics.jsonl"
        if code in REFUSED or not metrics.exists():
            raise SystemExit(f"{job.name}: exit code {code}, so it was not trained; see {self.out / job.name}.log")
        entries = [json.loads(line) for line in metrics.read_text().splitlines()]
        held_out = [entry["loss"] for entry in entries if entry["kind"] == "validation"]
        steps = [entry for entry in entries if entry["kind"] == "step"]
        row = {
            "name": job.name, "size": job.size, "arm": job.arm, "seed": job.seed, "multiple": job.multiple,
            "share": job.share, "repeat": job.repeat, "flops": counted, "tokens": steps[-1]["tokens"],
            "loss": held_out[-1] if code == 0 else math.inf, "curve": held_out, "exit_code": code,
            "seconds": round(sum(entry["seconds"] for entry in steps)),
        }  # fmt: skip
        if code == 0 and job.share == 1 and not job.repeat:
            self._export(job)
            self._average(job)
        self.add(row)
        shutil.rmtree(runs / job.name)
        file.unlink()
        print(f"{job.name}: {row['loss']:.4f} after {row['tokens']:,} tokens", flush=True)
        return row

    def _export(self, job: Job) -> None:
        """Export the weights of a run, for `judge`."""
        run(["export", str(self.out / "runs" / job.name), "--out", str(self.out / "models" / job.name)],
            self.out / "export.log", check=True)  # fmt: skip

    def _average(self, job: Job) -> None:
        """Measure the means of a reference's last checkpoints; they cost no training."""
        if job.arm != self.protocol.reference:
            return
        folder = self.out / "runs" / job.name
        for arm, number in self.protocol.averages().items():
            of = Job(job.size, arm, job.seed, job.multiple)
            mean = self.out / "runs" / of.name
            shutil.rmtree(mean, ignore_errors=True)
            run(
                ["average", str(folder), "--last", str(number), "--out", str(mean)],
                self.out / "average.log",
                check=True,
            )
            run(["eval", str(mean)], self.out / "average.log", check=True)
            (line,) = (mean / "evaluations.jsonl").read_text().splitlines()
            loss = json.loads(line)["figures"]["loss"]
            self.add({"name": of.name, "size": job.size, "arm": arm, "seed": job.seed, "multiple": job.multiple,
                      "share": 1.0, "repeat": 0, "loss": loss, "curve": [loss], "exit_code": 0})  # fmt: skip
            shutil.rmtree(mean)

    def multiple(self, arm: str) -> float | None:
        """Return the multiple of an arm's rate with the lowest loss in tuning; None before all of them are there."""
        jobs, results = self.tuning(arm), self.results()
        if any(job.name not in results for job in jobs):
            return None
        return min(jobs, key=lambda job: (results[job.name]["loss"], job.multiple)).multiple

    def tuning(self, arm: str) -> list[Job]:
        """Return an arm's runs of tuning, at the smallest size."""
        own = self.protocol.tree["tuning"]
        return [Job(self.protocol.sizes[0], arm, own["seed"], each, own["share"]) for each in own["multiples"]]

    def waves(self) -> Iterator[list[Job]]:
        """Yield the jobs in the protocol's order, in waves that may run side by side."""
        tree, small = self.protocol.tree, self.protocol.sizes[0]
        reference, seeds = self.protocol.reference, tree["seeds"]
        for arm in self.protocol.trained():
            yield self.tuning(arm)
            rate = self.multiple(arm)
            if rate is None:
                return
            own = [Job(small, arm, seed, rate) for seed in (seeds if arm == reference else seeds[:1])]
            yield own + ([Job(small, arm, seeds[0], rate, repeat=1)] if arm == reference else [])
        finalists = finalists_of(self.protocol, self.results())
        if finalists is None:
            return
        for size in self.protocol.sizes:
            yield [Job(size, arm, seed, self.multiple(arm) or 1.0) for seed in seeds for arm in finalists]


def run(words: list[str], log: Path, *, check: bool = False, seconds: float | None = None) -> int:
    """Run a verb of the product on one thread; when the seconds are over, stop it as a signal would, and wait."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("a") as file:
        process = subprocess.Popen(
            [*MODULE, *words], stdout=file, stderr=subprocess.STDOUT, env=environment, preexec_fn=_die_with_parent
        )
        try:
            process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.terminate()
            process.wait()
    if check and process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}; see {log}")
    return process.returncode


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a race that is killed leaves no run behind


def judge(race: Race, folder: Path) -> None:
    """Fine-tune and measure the finalists' exports on suite.yaml; `eval --suite` keeps finished cells."""
    text = (HERE / "suite.yaml").read_text(encoding="utf-8").replace("FOLDER", str(folder.resolve()))
    tree = yaml.safe_load(text)
    for name, task in tree["tasks"].items():
        if "finetune" in task:
            own = race.out / f"task-{name}.yaml"
            own.write_text(yaml.safe_dump(task["finetune"], sort_keys=False))
            task["finetune"] = str(own)
    suite = race.out / "suite.yaml"
    suite.write_text(yaml.safe_dump(tree, sort_keys=False))
    models = sorted(str(each) for each in (race.out / "models").iterdir())
    run(["eval", *models, "--suite", str(suite), "--out", str(race.out / "judged")], race.out / "judge.log", check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="folder with the protocol's text files")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="folder with the data of suite.yaml")
    parser.add_argument("--protocol", type=Path, default=HERE / "protocol.yaml")
    parser.add_argument("--hours", type=float, default=2.0, help="stop, to be continued, after so long")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--table", action="store_true", help="write only the table and the picture so far")
    options = parser.parse_args()
    race = Race(Protocol.read(options.protocol), options.out, options.hours)
    if not options.table:
        if options.text is None:
            parser.error("--text is missing: the folder with the protocol's text files")
        race.prepare(race.protocol.check_text(options.text))
        with ThreadPoolExecutor(options.jobs) as pool:
            for wave in race.waves():
                if None in list(pool.map(race.train, wave)):
                    print("not finished: the same command continues")
                    break
            else:
                if options.judge is not None:
                    judge(race, options.judge)
    write_table(race.protocol, race.results(), race.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
