"""Runs that begin with the weights of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from modernbert_train.__main__ import main
from modernbert_train.config.schema import ModernBertConfig
from tests.support.runs import weights

MODEL = ModernBertConfig(
    vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48, local_attention=16, init_std=0.1
)
# one step with hardly any update, so that its checkpoint holds the first weights
STILL = (
    "phases.short.tokens=200",
    "phases.short.batch_warmup=null",
    "phases.short.schedule.warmup_tokens=0",
    "phases.long=null",
    "optim.lr=1e-30",
    "optim.weight_decay=0",
)
LARGER = ("model.hidden_size=48", "model.num_heads=3", "model.num_layers=7", "model.intermediate_size=64")


def first_weights(words: list[str], folder: Path) -> dict[str, Tensor]:
    assert main(["train", *words]) == 0
    return weights(folder)


def run_of(words: list[str], model: dict[str, Any], objective: str = "mlm") -> list[str]:
    """Return the tiny run with another encoder and objective."""
    file = Path(words[0])
    run = yaml.safe_load(file.read_text())
    run["model"], run["objective"] = model, {"name": objective}
    if model["name"] != "modernbert":
        del run["phases"]["long"]["model"]
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    return words
