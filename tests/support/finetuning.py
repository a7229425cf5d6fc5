"""Fine-tune by the verb, and read its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from modernbert_train.__main__ import main
from tests.support.front_door import Cli
from tests.support.labelled import PLAIN, WriteTask, sentences, write_splits
from tests.support.tiny_run import TIMES

FAST = ["compute.device=cpu", "data.num_workers=0", "logging.progress_bar=false"]


def finetune(task: Path | str, model: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """Run the verb in this process; return its result."""
    words = [f"runs_folder={folder}", "name=tone", *FAST, *overrides]
    assert main(["finetune", str(task), "--model", str(model), *words]) == 0
    return json.loads((folder / "tone" / "result.json").read_text())


class Tuning:
    """Fine-tuning by the verb, of tiny models.

    Attributes:
        folder: of the test; the results are in `tone`.
        models: a folder of each architecture, by its name.
        write: writes the task of two classes with these keys, and returns its file.
        cli: runs any command.
        said: output of the last fine-tuning, errors first.
    """

    def __init__(self, folder: Path, models: dict[str, Path], write: WriteTask, cli: Cli) -> None:
        self.folder, self.models, self.write, self.cli = folder, models, write, cli
        self.tone, self.said = folder / "runs" / "tone", ""

    def words(self, task: object, model: object, *overrides: object, into: str = "runs") -> list[str]:
        """Return the command, for a model of `models` or another one."""
        words = ["finetune", task, "--model", self.models.get(str(model), model), f"runs_folder={self.folder / into}"]
        return [str(word) for word in (*words, "name=tone", *FAST, *overrides)]

    def run(self, task: object, model: object, *overrides: object, into: str = "runs") -> dict[str, Any]:
        """Run the command; return its result."""
        self.said = "".join(reversed(self.cli(*self.words(task, model, *overrides, into=into))))
        return json.loads((self.folder / into / "tone" / "result.json").read_text())

    def refused(self, task: object, model: object, *overrides: object, code: int = 78) -> str:
        """Run the command, which ends with this code; return its error."""
        return str(self.cli(*self.words(task, model, *overrides), code=code).err)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [{k: v for k, v in e.items() if k not in TIMES} for e in entries if e["kind"] in ("step", "evaluation")]


def predictions(folder: Path, split: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.pop("split") == split]


def write_tags(folder: Path, write_task: WriteTask) -> Path:
    def written(seed: int) -> str:
        texts = [
            [f"{word}\t{'O' if word in PLAIN else 'B-' + label}\n" for word in text.split()]
            for text, label in sentences(80, seed)
        ]
        return "".join("".join(lines) + "\n" for lines in texts)

    return write_task(kind="tokens", epochs=6, **write_splits(folder, "conll", written(1), written(2)))


def plain_losses(
    model: Any, batch: dict[str, Any], optimizer: torch.optim.Optimizer, rates: Iterable[float]
) -> list[float]:
    """Train a model of transformers on one batch, a step for each learning rate; return the loss of each step."""
    losses = []
    for rate in rates:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
