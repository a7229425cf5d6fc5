"""Fine-tune by the verb, and read its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from modernbert_train.__main__ import main
from tests.support.labelled import PLAIN, WriteTask, sentences
from tests.support.tiny_run import TIMES

FAST = ["compute.device=cpu", "data.num_workers=0", "logging.progress_bar=false"]


def finetune(task: Path | str, model: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """Run the verb in this process; return its result."""
    words = [f"runs_folder={folder}", "name=tone", *FAST, *overrides]
    assert main(["finetune", str(task), "--model", str(model), *words]) == 0
    return json.loads((folder / "tone" / "result.json").read_text())


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [{k: v for k, v in e.items() if k not in TIMES} for e in entries if e["kind"] in ("step", "evaluation")]


def predictions(folder: Path, split: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.pop("split") == split]


def write_tags(folder: Path, write_task: WriteTask) -> Path:
    for name, seed in (("train", 1), ("dev", 2)):
        lines = []
        for text, label in sentences(80, seed):
            lines += [f"{word}\t{'O' if word in PLAIN else 'B-' + label}\n" for word in text.split()] + ["\n"]
        (folder / f"{name}.conll").write_text("".join(lines))
    return write_task(kind="tokens", train=f"{folder}/train.conll", validation={"dev": f"{folder}/dev.conll"}, epochs=6)


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
