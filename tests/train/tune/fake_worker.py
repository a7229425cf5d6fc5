"""A worker that trains nothing: it speaks as worker.py does, and fails as it is told.

    python fake_worker.py CONFIG.yaml WHAT.json

WHAT has the facts of the device, and rules: settings -> what becomes of a candidate that has them. `rate` multiplies
its tokens a second; `wrong` fails parity; `start`, `steps` or `parity` may be "crash", "hang", "full" or the text of an
error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml


def value(run: dict[str, Any], key: str) -> Any:
    if key == "microbatch_tokens":
        return run["phases"]["tuned"][key]
    section, name = key.split(".")
    return run[section].get(name)


def main(config: str, what: str) -> None:
    run, told = yaml.safe_load(Path(config).read_text()), json.loads(Path(what).read_text())
    rules = [rule for rule in told["rules"] if all(value(run, key) == wanted for key, wanted in rule["of"].items())]
    with (Path(what).parent / "asked.txt").open("a") as file:
        file.write(f"started {os.getpid()}\n")
    for line in sys.stdin:
        command = json.loads(line)
        do = command["do"]
        with (Path(what).parent / "asked.txt").open("a") as file:
            file.write(f"{do}\n")
        for fault in (rule[do] for rule in rules if do in rule):
            if fault == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if fault == "hang":
                time.sleep(60)
        fault = next((rule[do] for rule in rules if do in rule), None)
        full = value(run, "microbatch_tokens") > told.get("most_tokens", 1 << 30) and do in ("start", "parity")
        if fault == "full" or full:
            found = {"out_of_memory": True, "error": "OutOfMemoryError: CUDA out of memory"}
        elif fault is not None:
            found = {"error": fault}
        elif do == "look":
            found = told["facts"]
        elif do == "parity":
            equal = not any(rule.get("wrong") for rule in rules)
            found = {"equal": equal, "text": "states within 1e-07" if equal else "states off by 4.0e-01"}
        elif do == "start":
            slowest = max((rule.get("first_seconds", 1.0) for rule in rules), default=1.0)
            found = {"first_seconds": slowest, "seconds": 0.5, "peak_bytes": told.get("peak_bytes", 1000)}
        else:
            rate = 1000.0
            for rule in rules:
                rate *= rule.get("rate", 1.0)
            found = {"tokens_per_second": [rate] * command["number"]}
        print(f"a library prints\ntune: {json.dumps(found)}", flush=True)


main(*sys.argv[1:])
