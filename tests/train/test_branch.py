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


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of a finished run of PLAIN to continue from."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder, data=tiny_data), encoding="utf-8")
    assert train([str(folder / "tiny.yaml"), *PLAIN, "name=both"]) == 0
    return folder / "both"


@pytest.mark.runs
def test_a_phase_as_a_separate_run_continues_with_weights_moments_and_text(
    tiny_run: TinyRun, left: Path, tmp_path: Path
) -> None:
    """The clock restarts at 0, and the first batch is the one that the previous run would have trained on next."""
    phase_end = min((left / "checkpoints").iterdir())
    assert train(tiny_run(*PLAIN, "phases.short=null", "name=second", f"start.checkpoint={phase_end}")) == 0
    both, second = records(left), records(tmp_path / "runs/second")
    at = next(i for i, entry in enumerate(both) if entry["phase"] == "long")
    assert second[0]["step"] == 1 and second[0]["loss"] == both[at]["loss"]
    assert second[0]["tokens"] == both[at]["tokens"] - both[at - 1]["tokens"]
    assert second[0]["update_norm"] == pytest.approx(both[at]["update_norm"], rel=1e-5), "moments are kept"
    first_end = records(tmp_path / "runs/second", "start")
    assert "clock reset, moments keep, data keep" in first_end[0]["from"]


@pytest.mark.runs
def test_moments_and_data_begin_again_if_configured(tiny_run: TinyRun, left: Path, tmp_path: Path) -> None:
    start = f"start={{checkpoint: {left}, moments: reset, data: restart}}"
    assert train(tiny_run(*PLAIN, "name=fresh", start)) == 0
    both, fresh = records(left), records(tmp_path / "runs/fresh")
    assert fresh[0]["tokens"] == both[0]["tokens"] and fresh[0]["loss"] < both[0]["loss"], "same text, trained weights"
    steps = newest(tmp_path / "runs/fresh").optimizer()["step/head.norm.weight"]
    assert int(steps) == len(fresh), "the moments are of this run only"


@pytest.mark.runs
def test_a_rollback_equals_the_run_it_left_even_at_a_border_where_moments_are_emptied(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """It keeps clock, moments and data; the next phase has other rows, and empties the moments once."""
    often = ("checkpoint.interval_steps=1", "checkpoint.keep=99", "data.validation=null", "phases.short.tokens=1500")
    words = (*PLAIN[:1], *often, "phases.long.reset_moments=true")
    assert train(tiny_run(*words, "name=whole")) == 0
    whole = tmp_path / "runs/whole"
    steps = records(whole)
    border = [entry["phase"] for entry in steps].index("long")
    assert int(newest(whole).optimizer()["step/head.norm.weight"]) == len(steps) - border
    for number in (border - 1, border, border + 1):  # as if killed right there
        at = whole / "checkpoints" / f"step-{number:08d}"
        assert train(tiny_run(*words, f"name=from{number}", f"start={{checkpoint: {at}, clock: keep}}")) == 0
        again = tmp_path / f"runs/from{number}"
        assert records(again) == steps[number:]
        assert_same_state(newest(again), newest(whole))
