"""Evaluation of a named checkpoint: the figure must belong to it, or there must be none.

If this breaks, users who compare checkpoints of a run see the newest one's number each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.checkpoints.checkpoint import open_named
from modernbert_train.checkpoints.results import read_results
from modernbert_train.evaluate.evaluate import describe, evaluate_run
from modernbert_train.evaluate.heldout import Evaluation
from tests.support.runs import records
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
def test_eval_measures_the_checkpoint_that_is_named(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with the run's own measurements at those steps; the phases differ in row length and RoPE base."""
    assert main(["train", *tiny_run()]) == 0
    folder = tmp_path / "runs/tiny"
    recorded = (folder / "metrics.jsonl").read_bytes()
    first, last = records(folder, "validation")
    for entry in (first, last):
        named = folder / f"checkpoints/step-{entry['step']:08d}"
        found = evaluate_run(read_run([str(named)]), checkpoint=open_named(named))["heldout"]
        assert found == {key: entry[key] for key in found}
        capsys.readouterr()
        assert main(["eval", str(named)]) == 0
        text = capsys.readouterr().out
        assert named.name in text and f"{entry['loss']:.3f}" in text
    assert first["loss"] != last["loss"]
    assert main(["eval", str(folder)]) == 0
    assert capsys.readouterr().out == text, "a run's folder means its newest checkpoint"
    assert (folder / "metrics.jsonl").read_bytes() == recorded, "the run's own record is unchanged"
    kept = read_results(folder)  # each was measured more than once
    assert [(each.step, each.checkpoint) for each in kept] == [
        (entry["step"], f"step-{entry['step']:08d}") for entry in (first, last)
    ]
    assert kept[-1].figures["loss"] == last["loss"] and kept[-1].name.startswith("heldout, data ")

    for verb in ("eval", "export"):
        absent = folder / "checkpoints/step-1"
        assert main([verb, str(absent)]) == 74
        message = capsys.readouterr().err
        assert f"{absent}: no such checkpoint. Name one of those in {absent.parent}: step-" in message
    assert main(["export", str(folder)]) == 0
    hf = str(folder / "hf")
    assert main(["eval", hf]) == 78 and f"Add a run's YAML file: eval {hf} RUN.yaml" in capsys.readouterr().err
    assert main(["eval", hf, *tiny_run(), "phases.short=null"]) == 0
    assert f"{last['loss']:.3f}" in capsys.readouterr().out, "any model is measured on a run's text"
    weights = named / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["eval", str(named)]) == 74
    message = capsys.readouterr().err
    assert "model.safetensors: damaged" in message and f"step-{first['step']:08d}, or the run" in message
    assert main(["eval", str(folder)]) == 0
    assert "passed over a damaged checkpoint" in capsys.readouterr().out


def test_a_model_worse_than_the_unigram_is_not_better_by_a_negative_number() -> None:
    better = Evaluation(2.0, 0.5, 3.0, 0.25, 100)
    assert "  better by       1.000     25.0%" in describe(better, 0.15, "step-1")
    worse = Evaluation(3.5, 0.125, 3.0, 0.25, 100)
    assert "  worse by        0.500     12.5%" in describe(worse, 0.15, "step-1")
