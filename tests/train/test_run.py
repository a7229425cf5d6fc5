"""Whole runs by their command: an interruption at any point must not change the result."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.runs import assert_same_state, finish, interrupt_after, newest, records
from tests.support.tiny_run import TinyRun


@pytest.mark.runs
@pytest.mark.timeout(280)
def test_a_run_killed_again_and_again_equals_one_that_never_stopped(tiny_run: TinyRun, tmp_path: Path) -> None:
    """kill -9 and SIGTERM at random steps, another number of workers each time, with dropout: record, validation and
    weights are equal bit for bit."""
    common = ["model.attention_out_dropout=0.1", "checkpoint.interval_steps=2", "phases.short.tokens=5000"]
    whole, broken = tmp_path / "runs/whole", tmp_path / "runs/broken"
    code, output = finish(tiny_run(*common, "name=whole", "data.num_workers=0"))
    assert code == 0, output
    expected = records(whole)
    assert len(expected) > 15

    draw = random.Random(1)
    for number, workers in ((signal.SIGKILL, 2), (signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        words = tiny_run(*common, "name=broken", f"data.num_workers={workers}")
        code = interrupt_after(words, broken, draw.randint(1, 3), number, checkpoints=1)
        assert code == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    code, output = finish(tiny_run(*common, "name=broken", "data.num_workers=1"))
    assert code == 0, output

    assert records(broken) == expected
    assert records(broken, "validation") == records(whole, "validation")
    assert len(records(broken, "resume")) == 3
    one, other = newest(whole), newest(broken)
    assert one.step == other.step == expected[-1]["step"]
    assert_same_state(one, other)


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_a_run_resumes_from_before_its_first_step(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Step 0 is an ordinary checkpoint: a run resumed there ends the same, and eval and export accept it."""
    whole, again = tmp_path / "runs/whole", tmp_path / "runs/again"
    words = ("checkpoint.milestones=pythia", "checkpoint.keep=1", "phases.long=null")
    code, output = finish(tiny_run(*words, "name=whole"))
    assert code == 0 and "effective training time" in output, output
    steps = sorted(int(path.name.removeprefix("step-")) for path in (whole / "checkpoints").iterdir())
    assert steps[:5] == [0, 1, 2, 4, 8]
    saved = records(whole, "checkpoint")
    assert {entry["step"] for entry in saved} >= set(steps) and all(entry["bytes"] > 0 for entry in saved)
    for verb in ("eval", "export"):
        assert main([verb, str(whole / "checkpoints/step-00000000")]) == 0
    (again / "checkpoints").mkdir(parents=True)
    shutil.copytree(whole / "checkpoints/step-00000000", again / "checkpoints/step-00000000")
    code, output = finish(tiny_run(*words, "name=again"))
    assert code == 0 and "step-00000000" in output, output
    assert records(again) == records(whole)


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_starting_a_damaged_or_foreign_run_again(tiny_run: TinyRun, tmp_path: Path) -> None:
    """The second start in a run's folder: each case must end with the right code and a remedy."""
    folder = tmp_path / "runs/tiny"
    words = tiny_run("checkpoint.interval_steps=2", "phases.long=null", "phases.short.tokens=2500")
    code, output = finish(words)
    assert code == 0, output
    last = records(folder)[-1]

    # the newest checkpoint is truncated: the one before is used with a warning, and the result is the same
    weights = newest(folder).folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, output = finish(words)
    assert code == 0, output
    assert "passed over a damaged checkpoint" in output and "model.safetensors" in output
    assert records(folder)[-1] == last
    assert records(folder, "resume")[-1]["step"] < last["step"]

    code, output = finish([*words, "optim.lr=1e-2"], "--fresh")
    assert code == 0, output
    assert len(list((tmp_path / "runs").glob("tiny.until-*"))) == 1  # nothing was deleted
    assert records(folder)[0]["step"] == 1


@pytest.mark.runs
@pytest.mark.timeout(120)
def test_wandb_works_offline_and_a_broken_one_costs_nothing(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Without account or network the run is logged locally; a failing logger is switched off with a warning."""
    words = tiny_run("loggers.wandb.tags=[tiny]", "phases.long=null", "phases.short.tokens=1500")
    code, output = finish(words)
    assert code == 0 and "is off" not in output, output
    (file,) = (tmp_path / "runs/tiny/wandb").glob("offline-run-*/*.wandb")
    recorded = file.read_bytes()
    assert recorded.count(b"train/loss") >= len(records(tmp_path / "runs/tiny")) and b"optim.lr" in recorded

    (tmp_path / "runs/blocked").mkdir()
    (tmp_path / "runs/blocked/wandb").write_text("a file where wandb wants a folder")
    code, output = finish([*words, "name=blocked", "loggers.wandb.entity=nobody"])
    assert code == 0, output
    assert len(records(tmp_path / "runs/blocked")) > 3
