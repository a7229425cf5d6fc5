"""Phases and runs that continue from one another: exactly the configured parts carry over, even after kills.

If this breaks, a decay trains with another phase's moments, or a rollback silently begins from scratch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.runs import assert_same_state, newest, records
from tests.support.tiny_run import TINY_YAML, TinyRun

PLAIN = ("phases.short.batch_warmup=null", "phases.long.row_tokens=64", "phases.long.batch_rows=8")


def train(words: list[str]) -> int:
    return main(["train", *words])


def phase_end(folder: Path) -> Path:
    """Return the checkpoint that ends the first phase."""
    return min((folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return two finished runs to continue from: `whole`, and `both` of PLAIN."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder, data=tiny_data), encoding="utf-8")
    assert train([str(folder / "tiny.yaml"), "name=whole"]) == 0
    assert train([str(folder / "tiny.yaml"), *PLAIN, "name=both"]) == 0
    return folder


@pytest.mark.runs
def test_a_rollback_that_keeps_clock_moments_and_data_equals_the_run_it_left(
    tiny_run: TinyRun, runs: Path, tmp_path: Path
) -> None:
    middle = phase_end(runs / "whole")
    assert train(tiny_run("name=again", f"start.checkpoint={middle}", "start.clock=keep")) == 0
    whole, again = records(runs / "whole"), records(tmp_path / "runs/again")
    assert again and again == whole[-len(again) :] and len(again) < len(whole)
    ends = [newest(runs / "whole"), newest(tmp_path / "runs/again")]
    assert ends[0].folder.name == ends[1].folder.name
    assert_same_state(*ends)


@pytest.mark.runs
def test_a_phase_as_a_separate_run_continues_with_weights_moments_and_text(
    tiny_run: TinyRun, runs: Path, tmp_path: Path
) -> None:
    """The clock restarts at 0, and the first batch is the one that the previous run would have trained on next."""
    alone = ("phases.short=null", "name=second")
    assert train(tiny_run(*PLAIN, *alone, f"start.checkpoint={phase_end(runs / 'both')}")) == 0
    both, second = records(runs / "both"), records(tmp_path / "runs/second")
    at = next(i for i, entry in enumerate(both) if entry["phase"] == "long")
    assert second[0]["step"] == 1 and second[0]["loss"] == both[at]["loss"]
    assert second[0]["tokens"] == both[at]["tokens"] - both[at - 1]["tokens"]
    assert second[0]["update_norm"] == pytest.approx(both[at]["update_norm"], rel=1e-5), "moments are kept"
    first_end = records(tmp_path / "runs/second", "start")
    assert "clock reset, moments keep, data keep" in first_end[0]["from"]


@pytest.mark.runs
def test_moments_and_data_begin_again_if_configured(tiny_run: TinyRun, runs: Path, tmp_path: Path) -> None:
    start = f"start={{checkpoint: {runs}/both, moments: reset, data: restart}}"
    assert train(tiny_run(*PLAIN, "name=fresh", start)) == 0
    both, fresh = records(runs / "both"), records(tmp_path / "runs/fresh")
    assert fresh[0]["tokens"] == both[0]["tokens"] and fresh[0]["loss"] < both[0]["loss"], "same text, trained weights"
    steps = newest(tmp_path / "runs/fresh").optimizer()["step/head.norm.weight"]
    assert int(steps) == len(fresh), "the moments are of this run only"


@pytest.mark.runs
def test_a_phase_empties_the_moments_once_even_if_it_dies_at_the_border(tiny_run: TinyRun, tmp_path: Path) -> None:
    often = ("checkpoint.interval_steps=1", "checkpoint.keep=99", "data.validation=null")
    words = (*PLAIN, *often, "phases.short.tokens=1500", "phases.long.reset_moments=true")
    assert train(tiny_run(*words, "name=whole")) == 0
    whole = tmp_path / "runs/whole"
    steps = [entry["phase"] for entry in records(whole)]
    in_long = steps.count("long")
    assert int(newest(whole).optimizer()["step/head.norm.weight"]) == in_long
    border = len(steps) - in_long
    for name, number in (("before", border), ("after", border + 1)):  # as if killed right there
        at = whole / "checkpoints" / f"step-{number:08d}"
        assert train(tiny_run(*words, f"name={name}", f"start={{checkpoint: {at}, clock: keep}}")) == 0
        assert_same_state(newest(tmp_path / "runs" / name), newest(whole))
