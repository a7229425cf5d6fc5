"""How a run ends well: what it came to, and commands that work when they are typed as they stand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from modernbert_train.__main__ import main, read_run
from modernbert_train.evals.heldout import Evaluation
from modernbert_train.run.closing import closing_text
from tests.conftest import TinyRun


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
    assert capsys.readouterr().out.splitlines()[-4:] == said[at + 2 :]  # also when there is nothing left to train


def test_a_run_without_held_out_text_is_not_told_to_measure_it(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run("data.validation=null", "runs_folder=my runs"))
    assert closing_text(config, tokens=6_010, steps=14, loss=None, held_out=None) == (
        "done: 6,010 tokens in 14 steps\n"
        "next:\n"
        "  python -m modernbert_train export 'my runs/tiny'\n"
        "  python -m modernbert_train report 'my runs/tiny'"
    )
    held_out = str(Evaluation(3.5, 0.25, 6.5, 0.125, 900))
    text = closing_text(config, tokens=1, steps=1, loss=4.25, held_out=held_out)
    assert "loss 4.250, held-out loss 3.500 (unigram 6.500), accuracy 25.0%\n" in text
