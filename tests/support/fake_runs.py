"""Stand-ins for fine-tuning runs: processes that take no time, and end as BEHAVE says.

python -m tests.support.fake_runs finetune TASK --model MODEL ...   # the verb, with such runs
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from modernbert_train.evaluate.suite.cells import Cell

BEHAVE = "behave.json"  # in the folder of all runs: names of runs that "fail" or "wait" for a signal

BEST = "step-00000004"  # the checkpoint of a run's figures


def install() -> None:
    """Replace runs by stand-ins in this process."""
    from modernbert_train.evaluate.suite import cells

    cells._command = _command


def _command(cell: Cell, out: Path) -> list[str]:
    """Return the command of a run whose result is known, so that it imports nothing heavy."""
    from modernbert_train.evaluate.finetune.task import asked, named_model, read_task
    from modernbert_train.weights.names import weights_hash

    figures: dict[str, Any]
    own = ["--model", cell.model, *cell.overrides, f"runs_folder={out}", f"name={cell.name}"]
    if cell.module.endswith("submission"):
        return [sys.executable, "-m", "tests.support.fake_runs", "predicted", cell.task, *own]
    if cell.module != "modernbert_train":
        return [sys.executable, "-m", cell.module, cell.task, *own]
    now = weights_hash(named_model(cell.model).source)
    if cell.verb != ("finetune",):  # retrieval
        figures = {cell.task: {name: figure_of(cell.name) for name in ("ndcg_at_10", "main_score")}}
        result = {"task": cell.task, "seed": None, "figures": figures, "settings": {}, "source": cell.model}
        result["source_weights"] = now
    else:
        words = [*cell.overrides, f"runs_folder={out}", f"name={cell.name}", f"seed={cell.seed}"]
        task, rest = read_task(cell.task, words)
        figures = {metric: figure_of(cell.name) for metric in task.measured}
        result = {
            "task": Path(cell.task).stem, "source": cell.model, "seed": cell.seed, "weights": "scratch",
            "source_weights": now,
            "figures": {split: figures | {"loss": 1.0, "num_texts": 9.0} for split in task.validation},
            "settings": {"kind": task.kind, "validation": task.validation, "metrics": task.metrics, "best": task.best},
            "counted": {"epoch": 1, "step": 4, "checkpoint": BEST},
            "asked": asked(task, cell.model, rest),
        }  # fmt: skip
    words = ["run", str(out / cell.name), named_model(cell.model).source, json.dumps(result)]
    return [sys.executable, "-S", __file__, *words]


def figure_of(name: str) -> float:
    """Return the figure of a run."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:4], 16) / 65536


def starts(out: Path) -> dict[str, int]:
    """Count the starts of each run."""
    return {file.parent.name: len(file.read_text().splitlines()) for file in out.glob("*/starts")}


def run(name: str, source: str, result: str) -> int:
    """Act as a run, as far as other processes can see."""
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: _saved(folder))
    with (folder / "starts").open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {os.environ['OMP_NUM_THREADS']}\n")
    behaviour = folder.parent / BEHAVE
    behave = json.loads(behaviour.read_text()) if behaviour.exists() else {}
    while folder.name in behave.get("wait", ()):
        time.sleep(0.05)
    if folder.name in behave.get("fail", ()):
        print("error: the texts are missing. Name others.")
        return 65
    if folder.name in behave.get("diverge", ()):
        print("error: the loss is not finite.")
        return 70
    if folder.name in behave.get("undefined", ()):
        whole = json.loads(result)
        whole["figures"] = {split: dict.fromkeys(each) for split, each in whole["figures"].items()}
        result = json.dumps(whole)
    if not Path(source).exists():
        return 74
    (folder / "checkpoints" / BEST).mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(result)
    return 0


def predicted() -> None:
    """Act as the program of a submission, with predictions that a test has written into the run."""
    from modernbert_train.config.tools.suite import SubmitConfig
    from modernbert_train.evaluate.finetune.kinds import kind_of
    from modernbert_train.evaluate.finetune.task import read_task
    from modernbert_train.evaluate.suite.cells import parse_cell_command
    from modernbert_train.evaluate.suite.submission import PREDICTIONS, write_submission

    del sys.argv[1]
    task, run, words, out = parse_cell_command()
    out.mkdir()
    kind = kind_of(read_task(task, words[1:])[0].kind)
    made = Path(run) / "submission.jsonl"
    (out / PREDICTIONS).write_text(made.read_text() if made.exists() else "")
    files = json.loads(words[0].removeprefix("submit="))
    asked = {name: SubmitConfig(**part) for name, part in files.items()}
    write_submission(asked, kind, ["down", "up"], task, Path(run), out)


def _saved(folder: Path) -> NoReturn:
    (folder / "saved").write_text("")
    os._exit(75)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(*sys.argv[2:]))
    if sys.argv[1] == "predicted":
        from modernbert_train.errors import exit_code_of

        sys.exit(exit_code_of(predicted))
    install()
    from modernbert_train.__main__ import program

    program()
