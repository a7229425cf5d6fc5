"""In place of fine-tunings: processes that take no time, and end as a real one would. They do what BEHAVE says.

python -m tests.evaluate.finetune.fake_runs finetune TASK --model MODEL ...   # the verb, with such runs
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from modernbert_train.evaluate.finetune.task import asked, named_model, read_task
from modernbert_train.evaluate.suite import cells

BEHAVE = "behave.json"  # in the folder of all: names of runs that "fail" or "wait" for a signal


def install() -> None:
    """Have runs be such ones, in this process."""
    cells._command = _command


def _command(cell: cells.Cell, out: Path) -> list[str]:
    own = [f"runs_folder={out}", f"name={cell.name}", f"seed={cell.seed}"]
    words = [cell.task, cell.model, *cell.overrides, *own]
    return [sys.executable, "-m", "tests.evaluate.finetune.fake_runs", "run", *words]


def figure_of(name: str) -> float:
    """What a run comes to."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:4], 16) / 65536


def run(task_name: str, model: str, *words: str) -> int:
    """A run, as far as others see it."""
    last = dict(word.split("=", 1) for word in words)
    out = Path(last["runs_folder"])
    folder = out / last["name"]
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: _saved(folder))
    with (folder / "starts").open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {os.environ['OMP_NUM_THREADS']}\n")
    behave = json.loads((out / BEHAVE).read_text()) if (out / BEHAVE).exists() else {}
    while last["name"] in behave.get("wait", ()):
        time.sleep(0.05)
    if last["name"] in behave.get("fail", ()):
        print("error: the texts are of nobody. Name others.")
        return 65
    source = named_model(model).source
    if not Path(source).exists():
        return 74
    figures: dict[str, Any]
    if Path(task_name).suffix != ".yaml":  # a set of retrieval
        figures = {task_name: {name: figure_of(last["name"]) for name in ("ndcg_at_10", "main_score")}}
        (folder / "result.json").write_text(
            json.dumps({"task": task_name, "seed": None, "figures": figures, "settings": {}, "source": model})
        )
        return 0
    task, rest = read_task(task_name, words)
    figures = {metric: figure_of(last["name"]) for metric in task.measured}
    result = {
        "task": Path(task_name).stem, "source": model, "seed": int(last["seed"]), "weights": "scratch",
        "figures": {split: figures | {"loss": 1.0, "num_texts": 9.0} for split in task.validation},
        "settings": {"kind": task.kind, "validation": task.validation, "metrics": task.metrics},
        "asked": asked(task, model, rest),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return 0


def _saved(folder: Path) -> NoReturn:
    (folder / "saved").write_text("")
    os._exit(75)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(*sys.argv[2:]))
    install()
    from modernbert_train.__main__ import program

    program()
