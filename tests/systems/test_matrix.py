"""Every encoder with every objective: it trains, goes on as if never stopped, is measured, and two ranks are as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from modernbert_train.__main__ import main
from tests.conftest import TinyRun

SMALL = {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
ENCODERS: dict[str, dict[str, Any]] = {
    "modernbert": SMALL | {"num_layers": 4, "local_attention": 16},
    "bert": SMALL | {"num_layers": 2, "max_positions": 128},
}
OBJECTIVES = ("mlm", "causal", "sop")
PAIRS = [(encoder, objective) for encoder in ENCODERS for objective in OBJECTIVES]


def system(words: list[str], encoder: str, objective: str) -> list[str]:
    """The tiny run with another encoder and objective."""
    file = Path(words[0])
    run = yaml.safe_load(file.read_text())
    run["model"], run["objective"] = {"name": encoder} | ENCODERS[encoder], {"name": objective}
    if encoder != "modernbert":
        del run["phases"]["long"]["model"]
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    return words


@pytest.mark.runs
@pytest.mark.parametrize(("encoder", "objective"), PAIRS)
def test_trains(tiny_run: TinyRun, tmp_path: Path, encoder: str, objective: str) -> None:
    words = system(tiny_run(), encoder, objective)
    assert main(["train", *words]) == 0
    assert main(["eval", *words]) == 0
