"""Evaluation of a named checkpoint: the figure must belong to it, or there must be none.

If this breaks, users who compare checkpoints of a run see the newest one's number each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.checkpoints.checkpoint import open_named
from modernbert_train.checkpoints.evaluations import read_results
from modernbert_train.evaluate.evaluate import describe, evaluate_run
from modernbert_train.evaluate.heldout import Evaluation
from tests.support.front_door import Cli
from tests.support.runs import records
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
def test_eval_measures_the_checkpoint_that_is_named(tiny_run: TinyRun, tmp_path: Path, cli: Cli) -> None:
    """Compared with the run's own measurements at those steps; the phases differ in row length and RoPE base."""
    cli("train", *tiny_run())
    folder = tmp_path / "runs/tiny"
    recorded = (folder / "metrics.jsonl").read_bytes()
    first, last = records(folder, "validation")
    for entry in (first, last):
        named = folder / f"checkpoints/step-{entry['step']:08d}"
        found = evaluate_run(read_run([str(named)]), checkpoint=open_named(named))["heldout"]
        assert found == {key: entry[key] for key in found}
        text = cli("eval", named).out
        assert named.name in text and f"{entry['loss']:.3f}" in text
    assert first["loss"] != last["loss"]
    assert cli("eval", folder).out == text, "a run's folder means its newest checkpoint"
    assert (folder / "metrics.jsonl").read_bytes() == recorded, "the run's own record is unchanged"
    kept = read_results(folder)  # each was measured more than once
    assert [(each.step, each.checkpoint) for each in kept] == [
        (entry["step"], f"step-{entry['step']:08d}") for entry in (first, last)
    ]
    assert kept[-1].figures["loss"] == last["loss"] and kept[-1].name.startswith("heldout, data ")

    absent = folder / "checkpoints/step-1"
    for verb in ("eval", "export"):
        message = f"{absent}: no such checkpoint. Name one of those in {absent.parent}: step-"
        assert message in cli(verb, absent, code=74).err
    cli("export", folder)
    hf = folder / "hf"
    assert f"Add a run's YAML file: eval {hf} RUN.yaml" in cli("eval", hf, code=78).err
    said = cli("eval", hf, *tiny_run(), "phases.short=null").out
    assert f"{last['loss']:.3f}" in said, "any model is measured on a run's text"
    weights = named / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    said = cli("eval", named, code=74).err
    assert "model.safetensors: damaged" in said and f"step-{first['step']:08d}, or the run" in said


def test_a_model_worse_than_the_unigram_is_not_better_by_a_negative_number() -> None:
    better = Evaluation(2.0, 0.5, 3.0, 0.25, 100)
    assert "  better by       1.000     25.0%" in describe(better, 0.15, "step-1")
    worse = Evaluation(3.5, 0.125, 3.0, 0.25, 100)
    assert "  worse by        0.500     12.5%" in describe(worse, 0.15, "step-1")
