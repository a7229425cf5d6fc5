"""Damaged files: of checkpoints, and of the data while a run trains."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.drill.killed import anywhere
from benchmarks.drill.lab import WORKERS, Lab, Outcome, Round, slow_steps


def damage(harm: Callable[[Path, random.Random], str], files: str = "*") -> Round:
    """Damage one file in each checkpoint except the two oldest; a start has to pass over every damaged one."""

    def round(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
        run = lab.stopped()
        folders = sorted(run.checkpoints.iterdir())[2:][-number:]
        done = {}
        for folder in folders:
            path = draw.choice(sorted(path for path in folder.glob(files) if path.is_file()))
            done[folder.name] = f"{path.name} of {folder.name}: {harm(path, draw)}"
        ended = run.finish()
        problem = ended.wrong(0) or lab.wait_until_gone() or run.differs(lab.reference())
        passed = {
            name for name in done for line in ended.said.splitlines() if "passed over" in line and f"{name}" in line
        }
        outcomes = []
        for name, what in done.items():
            if problem:
                outcomes.append(Outcome(what, "lost", f"one of {len(done)}: {problem}"))
            elif name in passed:
                outcomes.append(Outcome(what, "survived"))
            elif name > min(passed, default=""):  # newer ones are examined first: this one was accepted
                outcomes.append(Outcome(what, "survived", "not noticed, and made no difference"))
        if not problem:
            lab.remove(run)
        return outcomes

    return round


def flip_bit(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} flipped"


def truncate(path: Path, draw: random.Random) -> str:
    size = path.stat().st_size
    size_kept = draw.choice([0, 1, size // 4, size // 2, size * 99 // 100, size - 1])
    os.truncate(path, size_kept)
    return f"cut to {size_kept} of {size} bytes"


HARDLY_JSON = {
    "100,000 brackets": "[" * 100_000,
    "nested 100,000 deep": '{"files": ' * 100_000 + "1" + "}" * 100_000,
    "infinite": '{"step": Infinity, "schema": NaN}',
    "empty": "",
    "zeros": "\0" * 4096,
    "a list": "[]",
    "a huge number": '{"step": ' + "9" * 10_000 + "}",
}
VALUES: list[Any] = [None, True, -1, 1e308, 10**30, "", "../../../../etc/passwd", "/etc/passwd", "\0", [], {}]


def edit_json(path: Path, draw: random.Random) -> str:
    """Replace one value or key anywhere in it, or all of it."""
    if draw.random() < 0.3:
        name = draw.choice(list(HARDLY_JSON))
        path.write_text(HARDLY_JSON[name])
        return name
    tree = json.loads(path.read_text())
    entries = [(node, key) for node in nodes(tree) for key in (node if isinstance(node, dict) else range(len(node)))]
    node, key = draw.choice(entries)
    if isinstance(node, dict) and draw.random() < 0.3:
        name = draw.choice(["../../../../etc/passwd", "/dev/zero", "a" * 5000, "", "."])
        node[name] = node.pop(key)
        what = f"key {key} called {name[:30]!r}"
    else:
        value = draw.choice([*VALUES, float("inf"), float("nan")])
        what = f"{key}: {value!r}"
        node[key] = value
    path.write_text(json.dumps(tree))
    return what


def nodes(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)) and tree:
        yield tree
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from nodes(each)


def remove(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "removed"


def nothing_whole(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Damage every checkpoint: the run must refuse, and not begin at 0."""
    outcomes = []
    for _ in range(number):
        run = lab.stopped()
        for folder in run.checkpoints.iterdir():
            flip_bit(draw.choice(sorted(folder.iterdir())), draw)
        ended = run.finish()
        problem = ended.wrong(74) or ("" if "no checkpoint is whole" in ended.said else ended.said[-300:])
        outcomes.append(Outcome("all checkpoints damaged", "lost" if problem else "refused", problem))
        lab.remove(run)
    return outcomes


def data_faults(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Damage a file of the data while the run trains; then restore it and repeat the command."""
    outcomes = []
    for _ in range(number):
        copy = lab.folder / "harmed"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(lab.data / "train", copy)
        run = lab.run(1, f"data.train={copy}", draw.choice([WORKERS, "data.num_workers=0"]))
        harm = draw.choice([flip_bit, truncate, remove])
        trainer = run.start(hook=slow_steps)
        anywhere(run, trainer, draw)
        path = draw.choice(sorted(copy.iterdir()))
        what = f"{path.name}: {harm(path, draw)}"
        ended = trainer.wait()
        shutil.rmtree(copy)
        shutil.copytree(lab.data / "train", copy)
        problem = ended.wrong(0, 65, 74, 78) or lab.wait_until_gone() or run.settle()
        exit_text = f"code {ended.code}"
        outcomes.append(Outcome(what, "lost" if problem else "survived", problem or exit_text))
        lab.remove(run)
    return outcomes
