"""A loss is compared with losses of its own phase only.

Longer rows or another RoPE base change the level of the loss, and a healthy first step of a phase would be skipped as a
spike.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.train.stability import Guard


def test_losses_of_the_phase_before_are_forgotten(tmp_path: Path) -> None:
    config = RunConfig(name="a", runs_folder=str(tmp_path))
    folder = RunFolder(config)
    folder.path.mkdir(parents=True)
    parts: Any = SimpleNamespace()
    guard = Guard(config.stability, Clock.of(config), config.seed, parts, parts, parts, folder, parts, lambda: None)
    for phase, before, after in (
        ("short", [], []),
        ("short", [3.0, 2.0], [3.0, 2.0]),
        ("long", [3.0, 2.0], []),
        ("long", [1.0], [1.0]),
    ):
        guard.memory["losses"] = before
        guard.begin(phase)
        assert (guard.memory["phase"], guard.memory["losses"]) == (phase, after)
