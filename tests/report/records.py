"""Lines of metrics.jsonl as the trainer writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modernbert_train.report.curves import Following, History


def step(number: int, loss: float = 3.0, phase: str = "stable", time: float | None = None) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "phase": phase, "tokens": number * 100, "rows": 8, "loss": loss, "lr": 1e-3,
        "grad_norm": 1.2, "update_norm": 0.1, "tokens_per_second": 50.0, "packing_efficiency": 0.99, "seconds": 2.0,
        "time": 1000.0 + 2 * number if time is None else time,
    }  # fmt: skip


def validation(number: int, loss: float = 2.5, phase: str = "stable") -> dict[str, Any]:
    return {
        "kind": "validation", "step": number, "phase": phase, "tokens": number * 100, "loss": loss, "accuracy": 0.5,
        "unigram_loss": 7.0, "unigram_accuracy": 0.04, "predicted": 10, "time": 1001.0 + 2 * number,
    }  # fmt: skip


def evaluation(number: int, name: str = "sst2", phase: str = "stable", **figures: float) -> dict[str, Any]:
    found = figures or {"accuracy": 0.6, "baseline/accuracy": 0.5, "num_texts": 40.0}
    return {
        "kind": "evaluation", "step": number, "phase": phase, "tokens": number * 100, "name": name, "figures": found,
        "time": 1001.5 + 2 * number,
    }  # fmt: skip


def fault(
    number: int, action: str, fault: str = "non_finite", loss: float | str = "nan", **more: Any
) -> dict[str, Any]:
    return {
        "kind": "fault", "fault": fault, "step": number, "phase": "stable", "tokens_before": (number - 1) * 100,
        "tokens": number * 100, "loss": loss, "grad_norm": "nan", "action": action, "time": 1000.5 + 2 * number, **more,
    }  # fmt: skip


def resume(number: int, time: float = 2000.0) -> dict[str, Any]:
    name = f"step-{number:08d}"
    return {"kind": "resume", "step": number, "tokens": number * 100, "time": time, "checkpoint": name}


def read_history(path: Path) -> History:
    """Read the whole of a metrics.jsonl, and the records in the same folder."""
    following = Following(path)
    following.refresh()
    following.finish()
    return following.history
