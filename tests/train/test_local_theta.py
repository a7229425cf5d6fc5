"""RoPE base of local layers as a phased value: applied in training, exported, and remembered by later runs.

If this breaks, a model is trained with one base and used with another: everything runs, with worse results.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main, read_run
from modernbert_train.clock import Clock
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.train.adapters import ComposerObjective
from modernbert_train.train.step import Loop
from modernbert_train.weights.source import Origin, open_model
from tests.support.tiny_run import TinyRun

LONG = "phases.long.model.local_rope_theta=40_000"


def first_angles(model: ModernBertForMaskedLM) -> dict[bool, list[float]]:
    """Return the angle between neighbours for each pair of a head, of global (True) and local (False) layers."""
    tables = model.model.rotary(torch.tensor([1]), torch.float32)
    return {kind: torch.atan2(sin_T2E[:, 1], cos_TE)[0].tolist() for kind, (cos_TE, sin_T2E) in tables.items()}


def test_the_clock_sets_the_angles_of_local_layers(tiny_run: TinyRun) -> None:
    """Before, in and (after a rollback) after the phase with another base; heads of 16 have 8 pairs."""
    config = read_run(tiny_run(LONG, "model.local_rope_theta=5_000"))
    model = ModernBertForMaskedLM(config.model)
    for tokens, local, whole in ((0, 5_000, 10_000), (4_100, 40_000, 160_000), (3_000, 5_000, 10_000)):
        state = SimpleNamespace(
            model=ComposerObjective(model),
            timestamp=SimpleNamespace(token=SimpleNamespace(value=tokens)),
            optimizers=[SimpleNamespace(param_groups=[])],
        )
        loop: Any = SimpleNamespace(clock=Clock.of(config), state=state, phase=None)
        plan: Any = SimpleNamespace(tokens_before=tokens, phase=Clock.of(config).at(tokens).name)
        Loop.set_clock(loop, plan)
        angles = first_angles(model)
        assert angles[False] == pytest.approx([local ** (-2 * pair / 16) for pair in range(8)], rel=1e-5)
        assert angles[True] == pytest.approx([whole ** (-2 * pair / 16) for pair in range(8)], rel=1e-5)


@pytest.mark.runs
def test_export_and_a_later_run_take_the_base_of_the_last_phase(tiny_run: TinyRun, tmp_path: Path) -> None:
    """A run that begins with other bases reports them in its banner."""
    short = ("phases.short.tokens=300", "phases.long.tokens=300", "phases.short.batch_warmup=null")
    rest = ("phases.short.schedule.warmup_tokens=0", "phases.long.schedule.decay_tokens=0", "data.validation=null")
    words = tiny_run(LONG, *short, *rest)
    assert main(["train", *words]) == 0
    assert main(["export", *words]) == 0
    written = json.loads((tmp_path / "runs/tiny/hf/config.json").read_text())
    assert written["local_rope_theta"] == 40_000
    assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == 40_000
    for place in ("runs/tiny", "runs/tiny/hf"):
        source = open_model(tmp_path / place)
        assert source.model.local_rope_theta == 40_000
        assert "local RoPE base 40,000 there, 10,000 here" in Origin(source, read_run(tiny_run())).describe()
        kept = read_run(tiny_run("phases.short.model.local_rope_theta=40_000"))
        assert "local RoPE base" not in Origin(source, kept).describe()
