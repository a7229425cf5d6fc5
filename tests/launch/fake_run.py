"""Stands in for launch/run.py: a run of ten steps of 100 tokens that stops, resumes and records like a real one.

    python fake_run.py TRIAL.yaml

Its figure is a function of optim.lr. `fake.txt` in the parent folder of the sweep changes its behaviour, line by line:
`SLOT exit CODE`, `SLOT diverge`, `SLOT silent`, `SLOT nan`, `SLOT slow`. `log.txt` there gets a line for every start,
step and end, and for every time that two processes use one folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 10
stopping = False


def loss(lr: float, step: int) -> float:
    return 10 * lr + 1 / step


def main() -> int:
    def on_signal(number: int, frame: object) -> None:
        global stopping
        stopping = True

    signal.signal(signal.SIGTERM, on_signal)
    folder = Path(sys.argv[1]).parent
    text = Path(sys.argv[1]).read_text()
    lr = float(next(line.split(":")[1] for line in text.splitlines() if line.startswith("  lr:")))
    home = folder.parent.parent
    log = (home / "log.txt").open("a", buffering=1)
    told = (home / "fake.txt").read_text().splitlines() if (home / "fake.txt").exists() else []
    plays = [words[1:] for line in told if (words := line.split())[0] == str(int(folder.name.split("-")[1]))]
    lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.write(f"clash {folder.name}\n")
        return 78
    log.write(f"start {folder.name}\n")
    metrics = folder / "metrics.jsonl"
    done = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    with metrics.open("a") as file:
        for step in range(len(done) // 2 + 1, STEPS + 1):
            if stopping:
                return 75
            time.sleep(0.2 if ["slow"] in plays else 0.005)
            log.write(f"step {folder.name} {step}\n")
            entry = {"kind": "step", "step": step, "tokens": 100 * step, "loss": 5.0}
            found = {"kind": "validation", "step": step, "tokens": 100 * step, "loss": loss(lr, step)}
            if ["nan"] in plays and step == STEPS:
                found["loss"] = float("nan")
            lines = [json.dumps(entry), json.dumps(found)]
            if ["silent"] in plays:
                lines.pop()
            os.write(file.fileno(), ("\n".join(lines) + "\n").encode())
            if step == 5 and ["diverge"] in plays:
                entry = {"kind": "fault", "fault": "non_finite", "tokens": 500, "action": "stop"}
                (folder / "faults.jsonl").write_text(json.dumps(entry) + "\n")
                return 70
            if step == 5 and (codes := [int(play[1]) for play in plays if play[0] == "exit"]):
                print("Error: as told", flush=True)
                return codes[0]
    if len(done) < 2 * STEPS:
        log.write(f"end {folder.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
