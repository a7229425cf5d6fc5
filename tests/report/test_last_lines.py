"""The final summary of a run: its results, and next commands that work as printed."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.config.load import to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.evaluate.heldout import Evaluation
from modernbert_train.report.banner import final_summary
from modernbert_train.report.run_list import read_run_state
from modernbert_train.report.tables import final_loss
from modernbert_train.report.training_loss import LOSS_STEPS, losses_of, training_loss
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
def test_the_commands_at_the_end_are_those_to_type(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *tiny_run()]) == 0
    said = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("done: "))
    assert "tokens in 14 steps, loss " in said[at] and "held-out loss " in said[at] and "effective" in said[at + 1]
    assert said[at + 2] == "next:"
    commands = [shlex.split(line) for line in said[at + 3 :]]
    assert [words[3] for words in commands] == ["eval", "export", "report"]
    for words in commands:
        assert words[:3] == ["python", "-m", "modernbert_train"]
        assert main(words[3:]) == 0
    assert (tmp_path / "runs/tiny/hf/config.json").is_file()
    capsys.readouterr()
    assert main(["train", *tiny_run()]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == said[at + 2 :]  # also if all is trained already


def summary(config: RunConfig, tokens: int, steps: int, loss: float | None = None, held_out: str | None = None) -> str:
    return final_summary(
        config.folder, tokens=tokens, steps=steps, loss=loss, held_out=held_out, measured=config.is_measured
    )


def test_a_run_without_held_out_text_gets_no_advice_to_measure_it(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run("data.validation=null", "runs_folder=my runs"))
    assert summary(config, 6_010, 14) == (
        "done: 6,010 tokens in 14 steps\n"
        "next:\n"
        "  python -m modernbert_train export 'my runs/tiny'\n"
        "  python -m modernbert_train report 'my runs/tiny'"
    )
    held_out = str(Evaluation(3.5, 0.25, 6.5, 0.125, 900))
    text = summary(config, 1, 20, 4.25, held_out)
    assert "loss 4.250 (mean of the last 20 steps), held-out loss 3.500 (unigram 6.500), accuracy 25.0%\n" in text


def test_a_run_has_one_training_loss_in_every_output(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The last line, `runs` and `report` showed three numbers for one run; repeated steps counted twice."""
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "tokens": 10 * step, "loss": float(step)} for step in (*range(1, 31), 29, 30, 31)
    ]
    assert losses_of(lines) == [float(step) for step in range(1, 32)]
    expected = sum(range(32 - LOSS_STEPS, 32)) / LOSS_STEPS
    assert training_loss(losses_of(lines)) == expected == 21.5
    assert training_loss([math.nan]) is None and training_loss([math.nan, 2.0]) == 2.0

    config = read_run(tiny_run())
    said = summary(config, 310, 31, training_loss(losses_of(lines)))
    assert "loss 21.500 (mean of the last 20 steps)" in said
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert read_run_state(folder, 0.0).loss == expected
    assert final_loss(np.array(losses_of(lines))) == expected
