"""Run the drill, see the package. Print and keep a line for each injury, and end with a table; 1 if a run was lost."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.drill import warm
from benchmarks.drill.injuries import INJURIES, Injury
from benchmarks.drill.lab import Lab, Outcome

VERDICTS = ("survived", "refused", "lost")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the remaining injuries; return 1 if a run was lost."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    reason = warm.private_mounts()
    if reason:
        print(f"no private mounts here ({reason}); /dev/shm is shared and not checked", flush=True)
    warm.prepare()
    lab = Lab(options.out.absolute(), options.seed, private=reason is None)
    kept = options.out / f"outcomes-{options.seed}.jsonl"
    print(f"seed {options.seed}", flush=True)
    for injury in [INJURIES[name] for name in options.only or INJURIES]:
        _do(injury, lab, kept, options)
    print(f"\n{table(kept)}\n\nno process lived longer than {lab.orphans:.1f} s after its run")
    return int(any(outcome.verdict == "lost" for _, outcome in read(kept)))


def _do(injury: Injury, lab: Lab, kept: Path, options: argparse.Namespace) -> None:
    num_rounds = injury.quick if options.scale == "quick" else round(injury.count * float(options.scale))
    done = Counter(name for name, outcome in read(kept))
    kept_rounds = _rounds(kept, injury.name)
    number, empty = 0, 0
    while done[injury.name] < num_rounds and empty < 5:
        if options.round is not None:
            number = options.round
        elif number in kept_rounds:
            number += 1
            continue
        began = time.monotonic()
        draw = lab.draw(injury.name, number)
        outcomes = injury.round(
            lab, draw, min(injury.at_a_time, num_rounds) if options.round is None else injury.at_a_time
        )
        seconds = time.monotonic() - began
        with kept.open("a", encoding="utf-8") as file:
            for outcome in outcomes:
                entry = {"injury": injury.name, "round": number, "seed": lab.seed} | asdict(outcome)
                file.write(json.dumps(entry) + "\n")
        for outcome in outcomes:
            print(f"{injury.name:16} {outcome.verdict:9} {outcome.what}  {outcome.detail}", flush=True)
        if any(outcome.verdict == "lost" for outcome in outcomes):
            again = f"python -m benchmarks.drill --seed {lab.seed} --only {injury.name} --round {number} --out FOLDER"
            print(f"  again: {again}", flush=True)
        print(f"{injury.name:16} round {number}: {len(outcomes)} in {seconds:.0f} s", flush=True)
        if options.round is not None or any(outcome.verdict == "skipped" for outcome in outcomes):
            return
        done[injury.name] += len(outcomes)
        empty = 0 if outcomes else empty + 1
        number += 1


def read(kept: Path) -> list[tuple[str, Outcome]]:
    """Return the previous outcomes, with the names of their injuries."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    entries = [json.loads(line) for line in lines]
    return [(each["injury"], Outcome(each["what"], each["verdict"], each["detail"])) for each in entries]


def _rounds(kept: Path, name: str) -> set[int]:
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return {entry["round"] for entry in map(json.loads, lines) if entry["injury"] == name}


def table(kept: Path) -> str:
    """Return injured, survived, refused clearly and lost, by kind, as Markdown."""
    counts: dict[str, Counter[str]] = {}
    for name, outcome in read(kept):
        counts.setdefault(name, Counter())[outcome.verdict] += 1
    lines = ["| injury | injected | survived | refused clearly | lost |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, count in counts.items():
        if count.keys() == {"skipped"}:
            lines.append(f"| {INJURIES[name].what} | not possible here | | | |")
            continue
        cells = " | ".join(str(count[verdict]) for verdict in VERDICTS)
        lines.append(f"| {INJURIES[name].what} | {sum(count[verdict] for verdict in VERDICTS)} | {cells} |")
    total = sum((count for count in counts.values()), Counter[str]())
    cells = " | ".join(f"**{total[verdict]}**" for verdict in VERDICTS)
    lines.append(f"| **all** | **{sum(total[verdict] for verdict in VERDICTS)}** | {cells} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drill", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of all injuries; default 1")
    parser.add_argument("--only", nargs="+", choices=INJURIES, metavar="KIND", help=", ".join(INJURIES))
    parser.add_argument("--round", type=int, help="repeat only this round of each kind")
    words = "quick: some minutes; 1.0: the whole drill; other numbers: that share of it"
    parser.add_argument("--scale", default="1.0", help=words)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of the outcomes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
