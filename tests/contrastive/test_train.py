"""A run that compares texts: it learns, is measured, resumes to the bit, follows masked tokens, and is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from tests.contrastive.conftest import ContrastiveRun
from tests.distributed.test_train_ranks import weights


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]


@pytest.mark.runs
def test_it_learns_which_text_answers_and_resumes_to_the_bit(
    contrastive_run: ContrastiveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dropout, whose two passes must be the same; the held-out figures are those of texts it has not seen."""
    words = contrastive_run(
        "model.attention_out_dropout=0.1", "checkpoint.interval_steps=3", "objective.symmetric=true"
    )
    assert main(["train", *words]) == 0
    run = tmp_path / "runs/pairs"
    steps, held_out = metrics(run, "step"), metrics(run, "validation")
    assert steps[0]["loss"] > 3 and steps[-1]["loss"] < 0.6 * steps[0]["loss"]
    assert held_out[-1]["predicted"] == 28 and held_out[-1]["unigram_accuracy"] == pytest.approx(1 / 56)
    assert held_out[-1]["accuracy"] > 0.3

    whole = weights(run)
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    assert main(["train", *words]) == 0
    again = weights(run)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    capsys.readouterr()
    assert main(["eval", str(run)]) == 0
    assert "28 predictions" in capsys.readouterr().out
