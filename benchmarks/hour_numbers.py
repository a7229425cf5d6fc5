"""Read numbers from the output of the parts of benchmarks.first_gpu_hour.

Each function takes the folder of all parts and the name of one, and raises Wrong if the numbers reveal an error that an
exit code of 0 hides.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.interrupted import records

Numbers = dict[str, float]

APART, RATE, SHARE = "apart from one rank, %", "tokens/s", "of base-one's tokens/s, %"
MEMORY, WAIT = "peak memory, GB", "data wait, %"
PRODUCT, COPY, GLOBAL, LOCAL = (
    "products, TFLOP/s",
    "copy, TB/s",
    "global attention, TFLOP/s",
    "local attention, TFLOP/s",
)
KILLED, STOPPED_IN, BLOCKED = "kill -9 to the end, s", "SIGTERM to the end, s", "longest wait for a checkpoint, s"
REFERENCE, COMPARED_STEPS, MAX_APART = "one-varlen", 20, 1.0
_OF = {"shared-muon": "one-muon", "one-muon": "one-muon"}  # part -> its reference part
NEEDED = (
    "attention kernel varlen",
    "attention kernel flex",
    "compute.compile",
    "optim.fused",
    "distributed backend nccl",
)


class Wrong(Exception):
    """An error revealed by the numbers, which are attached."""

    def __init__(self, text: str, numbers: Numbers) -> None:
        super().__init__(text)
        self.numbers = numbers


def figures(out: Path, name: str) -> Any:
    return json.loads((out / "parts" / f"{name}.figures.json").read_text(encoding="utf-8"))


def log(out: Path, name: str) -> str:
    return (out / "parts" / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def nothing(out: Path, name: str) -> Numbers:
    return {}


def doctor(out: Path, name: str) -> Numbers:
    """Check that everything a run on GPUs needs is usable."""
    lines = log(out, name).splitlines()
    numbers = {"GPUs": float(sum(line.startswith("ok    GPU ") for line in lines))}
    bad = [need for need in NEEDED if not any(line.startswith(f"ok    {need}") for line in lines)]
    if bad:
        raise Wrong(f"not usable: {', '.join(bad)}", numbers)
    return numbers


def collectives(out: Path, name: str) -> Numbers:
    """Count the right and the wrong collectives."""
    lines = log(out, name).splitlines()
    return {"right": float(sum(line.startswith("ok    ") for line in lines)),
            "wrong": float(sum(line.startswith("WRONG ") for line in lines))}  # fmt: skip


def losses(out: Path, name: str) -> Numbers:
    """Compare a run with the reference on the same batches and masks: losses may differ by rounding only."""
    reference = _OF.get(name, REFERENCE)
    mine, theirs = (
        [entry["loss"] for entry in records(out / "work/runs" / each, "step")] for each in (name, reference)
    )
    numbers = {"first loss": mine[0], "last loss": median(mine[-5:])}
    if name == reference or not _passed(out, reference):
        return numbers
    pairs = list(zip(mine, theirs, strict=False))[:COMPARED_STEPS]
    apart = [100 * abs(one - other) / max(abs(other), 1e-6) for one, other in pairs]
    numbers[APART] = max(apart)
    if len(mine) != len(theirs):
        raise Wrong(f"{len(mine)} steps, and {len(theirs)} of {reference}: not the same batches", numbers)
    if not max(apart) <= MAX_APART:
        step = apart.index(max(apart))
        raise Wrong(f"loss {mine[step]:.4f} at step {step + 1}, and {theirs[step]:.4f} of {reference}", numbers)
    return numbers


def _passed(out: Path, name: str) -> bool:
    file = out / "parts" / f"{name}.json"
    return file.exists() and json.loads(file.read_text(encoding="utf-8"))["outcome"] == "passed"


def kernels(out: Path, name: str) -> Numbers:
    """Return the four rates assumed by `plan`; attention is `varlen`, forward and backward, over all documents."""
    measured = figures(out, name)
    numbers = {PRODUCT: measured["flops_per_second"] / 1e12, COPY: measured["bytes_per_second"] / 1e12}
    for kind, label in (("global", GLOBAL), ("local", LOCAL)):
        lines = [
            line
            for line in measured["lines"]
            if line["part"] == "attention" and "error" not in line and line["case"] == "varlen"
            and line["stage"] != "prepare" and line["group"].startswith(f"attention, {kind}, 12 heads")
        ]  # fmt: skip
        if not lines:
            raise Wrong(f"no figures of varlen in {kind} layers", numbers)
        computed = sum(line["flops_per_second"] * line["ms"] for line in lines)
        numbers[label] = computed / sum(line["ms"] for line in lines) / 1e12
    return numbers


def tests(out: Path, name: str) -> Numbers:
    """Parse pytest's last line."""
    counts = {word: float(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", log(out, name))}
    return {"failed": 0.0} | counts


def step(out: Path, name: str) -> Numbers:
    """Return the speed of the bare loop, and of the same steps through `train`."""
    lines = {line["contender"]: line for line in figures(out, name)["lines"]}
    numbers = {RATE: lines["ours"]["tokens_per_second"], MEMORY: lines["ours"]["peak_bytes"] / 1e9}
    numbers["tokens/s through train"] = lines["ours, through train"]["tokens_per_second"]
    return numbers


def speed_of_run(out: Path, name: str) -> Numbers:
    """Return the speed of a run's later half, for one GPU."""

    def rate(of: str) -> float | None:
        steps = records(out / "work/runs" / of, "step")
        ranks = _ranks(out, of)
        return median(entry["tokens_per_second"] for entry in steps[len(steps) // 2 :]) / ranks if steps else None

    mine, one = rate(name), rate("base-one")
    if mine is None:
        return {}
    steps = records(out / "work/runs" / name, "step")
    numbers = {RATE: mine, MEMORY: max(entry["peak_memory_bytes"] for entry in steps) / 1e9}
    numbers[WAIT] = 100 * median(entry["data_wait_share"] for entry in steps[len(steps) // 2 :])
    numbers["MFU, %"] = 100 * median(entry.get("mfu", 0.0) for entry in steps[len(steps) // 2 :])
    if name == "base" and one is not None:
        numbers[SHARE] = 100 * mine / one
    return numbers


def _ranks(out: Path, name: str) -> int:
    match = re.search(r"^  on +(\d+) x ", log(out, name), re.MULTILINE)  # of the lines that a start prints
    return int(match[1]) if match else 1


def interrupted(out: Path, name: str) -> Numbers:
    measured = figures(out, name)
    numbers = {
        KILLED: measured["killed_seconds"],
        STOPPED_IN: measured["stopped_seconds"],
        BLOCKED: measured["blocked_seconds"],
    }
    if measured["wrong"]:
        raise Wrong("; ".join(measured["wrong"]), numbers)
    return numbers
