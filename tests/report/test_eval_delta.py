"""The table of a continued run. If this breaks, a user sees a model improve, or get worse, by a wrong amount."""

from __future__ import annotations

from typing import Any

from modernbert_train.__main__ import read_run
from modernbert_train.clock import Clock
from modernbert_train.report.eval_delta import eval_delta, measures_before
from tests.support.tiny_run import TinyRun


def lines(step: int, loss: float, accuracy: float, general: float) -> list[dict[str, Any]]:
    figures = {"loss": general, "baseline/loss": 7.0, "num_predicted": 10.0}
    return [
        {"kind": "validation", "step": step, "loss": loss, "accuracy": accuracy, "unigram_loss": 7.0},
        {"kind": "evaluation", "step": step, "name": "general", "figures": figures},
        {"kind": "step", "step": step, "loss": 1.0},
    ]


ENTRIES = [*lines(0, 2.0, 0.5, 1.5), *lines(9, 9.0, 0.1, 9.0), *lines(20, 1.0, 0.75, 1.6)]


def test_the_first_and_the_last_figures_stand_side_by_side(tiny_run: TinyRun) -> None:
    """Baselines, counts and intermediate measurements are left out."""
    config = read_run(tiny_run("weights.init_from=a/b", "eval.row_tokens=64"))
    table = eval_delta(Clock.of(config), config.eval, ENTRIES)
    assert table is not None and table.splitlines() == [
        "measured on          figure  before  after   change",
        "data.validation        loss       2      1  -1.0000",
        "data.validation  perplexity   7.389  2.718   -63.2%",
        "data.validation    accuracy     0.5   0.75  +0.2500",
        "evals.general          loss     1.5    1.6  +0.1000",
        "evals.general    perplexity   4.482  4.953   +10.5%",
    ]


def test_what_does_not_compare_is_reported(tiny_run: TinyRun) -> None:
    start = ("weights.init_from=a/b", "phases.long.objective={name: causal}")
    config = read_run(tiny_run(*start))
    table = eval_delta(Clock.of(config), config.eval, ENTRIES)
    assert table is not None and "set eval.row_tokens" in table and "The objective was not the same" in table


def test_there_is_no_table_without_two_measurements(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run("weights.init_from=a/b"))
    assert eval_delta(Clock.of(config), config.eval, lines(0, 2.0, 0.5, 1.5)) is None
    assert eval_delta(Clock.of(config), config.eval, lines(9, 2.0, 0.5, 1.5)) is None
    scratch = read_run(tiny_run())
    assert not measures_before(scratch.weights, scratch.objective), "a run from scratch lacks a first figure"
