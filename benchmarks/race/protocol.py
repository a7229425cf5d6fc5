"""Read the sealed protocol, and turn its arms into configurations of runs with equal FLOPs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modernbert_train.config.load import load_run
from modernbert_train.plan.flops import optimizer_flops
from modernbert_train.plan.make import make_plan

HERE = Path(__file__).parent
Tree = dict[str, Any]


@dataclass(frozen=True)
class Protocol:
    """The sealed file.

    Attributes:
        tree: its content.
        sha256: of its bytes; a folder holds the runs of one protocol.
    """

    tree: Tree
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Protocol:
        """Read a protocol file."""
        content = path.read_bytes()
        return cls(yaml.safe_load(content), hashlib.sha256(content).hexdigest())

    @property
    def sizes(self) -> list[str]:
        """Names of the sizes, the smallest first."""
        return list(self.tree["sizes"])

    @property
    def reference(self) -> str:
        """Name of the arm that all others are compared with."""
        return str(self.tree["reference"])

    def trained(self) -> list[str]:
        """Return the arms that train, the reference first."""
        others = [arm for arm, own in self.tree["arms"].items() if "average" not in own and arm != self.reference]
        return [self.reference, *others]

    def averages(self) -> dict[str, int]:
        """Return the arms that average checkpoints of the reference, with the number of checkpoints."""
        return {arm: own["average"] for arm, own in self.tree["arms"].items() if "average" in own}

    def check_text(self, folder: Path) -> list[Path]:
        """Return the text files, after comparing their hashes; SystemExit if one is missing or differs by a byte."""
        paths = []
        for name, expected in self.tree["text"].items():
            path = folder / name
            if not path.is_file():
                raise SystemExit(f"{path}: missing. The protocol races on this file (SHA-256 {expected}).")
            if (sha256 := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
                raise SystemExit(f"{path}: SHA-256 {sha256}, and the protocol's text has {expected}. Get that text.")
            paths.append(path)
        return paths


@dataclass(frozen=True)
class Job:
    """One run of the race.

    Attributes:
        size, arm: keys of the protocol.
        seed: of weights, order and masks.
        multiple: of the arm's learning rate.
        share: of the size's budget.
        repeat: 0, or the number of a repetition that should not differ by a bit.
    """

    size: str
    arm: str
    seed: int
    multiple: float = 1.0
    share: float = 1.0
    repeat: int = 0

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        tuning = f"-{self.share:g}-of-budget" if self.share != 1 else ""
        again = f"-again-{self.repeat}" if self.repeat else ""
        return f"{self.size}-{self.arm}-lr-{self.multiple:g}-seed-{self.seed}{tuning}{again}"


def configure(protocol: Protocol, job: Job, data: Path, runs: Path, file: Path) -> float:
    """Write the YAML of a job's run, with as many tokens as its budget buys; return its FLOPs."""
    budget, tokens = float(protocol.tree["sizes"][job.size]["budget"]) * job.share, 1_000_000
    for _ in range(2):
        file.write_text(yaml.safe_dump(_tree(protocol, job, data, runs, tokens), sort_keys=False), encoding="utf-8")
        flops_of_run = flops(file)
        tokens = round(tokens * budget / flops_of_run)
    return flops_of_run


def flops(file: Path) -> float:
    """Return the training FLOPs of a run: model and objective as `plan` counts them, and the optimizer's."""
    config = load_run([file])
    plan = make_plan(config, 1)
    update = optimizer_flops(plan.census, config.optim)
    per_token = {phase.name: phase.flops.training for phase in plan.phases}
    phases = [(phase, per_token[name]) for name, phase in config.phases.items()]
    return float(sum(phase.tokens * (each + update / (phase.batch_rows * phase.row_tokens)) for phase, each in phases))


def _tree(protocol: Protocol, job: Job, data: Path, runs: Path, tokens: int) -> Tree:
    run, size = deepcopy(protocol.tree["run"]), deepcopy(protocol.tree["sizes"][job.size])
    arm = deepcopy(protocol.tree["arms"][job.arm])
    model = _merged(run["model"] | size["model"], arm.get("model", {}))
    if "intermediate" in arm:
        model["intermediate_size"] = round(model["intermediate_size"] * arm["intermediate"])
    optim = _merged(run["optim"], arm.get("optim", {}))
    optim["lr"] *= job.multiple
    phases: Tree = {}
    for name, own in arm.get("phases", run["phases"]).items():
        share, warmup, decay = (own.pop(key) for key in ("share", "warmup", "decay"))
        length = {"warmup_tokens": round(tokens * warmup), "decay_tokens": round(tokens * decay)}
        schedule = length | own.pop("schedule", {})
        phases[name] = run["phase"] | {"tokens": round(tokens * share), "schedule": schedule} | own
    checkpoint: Tree = {"interval_seconds": 120, "keep": 1}
    if protocol.averages() and job.arm == protocol.reference:
        checkpoint["interval_tokens"] = round(0.04 * tokens)
    return {
        "name": job.name,
        "runs_folder": str(runs),
        "seed": job.seed,
        "data": {key: str(data / key) for key in ("train", "validation", "tokenizer")},
        "model": model,
        "optim": optim,
        "objective": run["objective"] | arm.get("objective", {}),
        "phases": phases,
        "eval": run["eval"],
        "checkpoint": checkpoint,
        "compute": run["compute"],
    }


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    """Return common settings with an arm's own; null drops a setting that the arm's kind does not have."""
    return {key: value for key, value in {**common, **own}.items() if value is not None}
