"""The expected held-out loss: a rule that must admit its limits, and a warning without false alarms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.corpus import write_corpus
from modernbert_train.__main__ import read_run
from modernbert_train.clock import Clock
from modernbert_train.distributed.compute import Compute
from modernbert_train.models.build import build_model
from modernbert_train.plan import expected_loss
from modernbert_train.plan.expected_loss import RULES, Rule, rule_of
from modernbert_train.report.progress import Progress
from modernbert_train.report.record import Record
from modernbert_train.train.measurements import HeldOut
from tests.support.paths import ROOT
from tests.support.texts import texts_of
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

RUNS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/expected_loss.json").read_text("utf-8"))["runs"]
UNIGRAM = 7.0


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


@pytest.mark.runs
@pytest.mark.parametrize("optimizer", RULES)
def test_the_constants_are_a_fit_of_the_table(optimizer: str) -> None:
    """If a table or a constant is changed without the other, predictions do not match measurements."""
    pytest.importorskip("scipy")
    from benchmarks.expected_loss import fit

    rule = RULES[optimizer]
    runs = [run for run in RUNS if run["optim"] == optimizer and not run["held_out"]]
    assert fit(runs).values == pytest.approx((rule.size, rule.data, rule.beta), rel=0.01)


def test_nine_of_ten_runs_lie_in_their_range() -> None:
    inside = []
    for run in RUNS:
        found = RULES[run["optim"]].expect(
            run["parameters"],
            run["tokens"],
            unigram_loss=run["unigram_loss"],
            unique_tokens=run["unique_tokens"],
            held_out_tokens=1e9,
        )
        assert found.low < found.loss < found.high
        inside.append(found.low <= run["loss"] <= found.high)
    assert sum(inside) >= 0.9 * len(inside)


def test_no_run_of_the_table_is_called_behind() -> None:
    for run in RUNS:
        for tokens, steps, loss, unigram in run["validations"]:
            said = RULES[run["optim"]].behind(
                loss,
                run["parameters"],
                tokens,
                steps,
                unigram_loss=unigram,
                unique_tokens=run["unique_tokens"],
                held_out_tokens=50_000,
            )
            assert said is None, f"{run['optim']} {run['text']} {run['width']}: {said}"


def test_a_run_that_learns_no_more_than_frequencies_is_called_behind(rule: Rule) -> None:
    """The quickstart with too small initial weights: 6.9 for any length of training."""
    said = rule.behind(6.8, 2_240_000, 800_000, 420, unigram_loss=6.9, unique_tokens=3e6, held_out_tokens=20_000)
    assert said is not None and said.startswith("held-out loss 6.80 is ") and "docs/stability.md" in said
    # no verdict where the rule is unknown: base, few steps of a large batch, a long run, text repeated very often
    for parameters, tokens, steps, unique in (
        (110e6, 800_000, 420, 3e6), (2e6, 2_000_000, 10, 3e6), (2e6, 1e9, 500_000, 1e9), (2e6, 1e6, 500, 1e4),
    ):  # fmt: skip
        given = {"unigram_loss": 6.9, "unique_tokens": unique, "held_out_tokens": 20_000}
        assert rule.behind(6.8, parameters, int(tokens), steps, **given) is None


def test_more_parameters_or_text_are_never_worse(rule: Rule) -> None:
    sizes, tokens = [10**k for k in range(4, 10)], [10**k for k in range(5, 13)]
    for losses in (
        [rule.expect(size, 1e6, unigram_loss=UNIGRAM).loss for size in sizes],
        [rule.expect(1e6, count, unigram_loss=UNIGRAM).loss for count in tokens],
        [rule.expect(1e6, 1e9, unigram_loss=UNIGRAM, unique_tokens=count).loss for count in tokens],
        [rule.expect(1e6, count, unigram_loss=UNIGRAM, unique_tokens=1e6).loss for count in tokens],
    ):
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert rule.expect(10, 10, unigram_loss=UNIGRAM).high == UNIGRAM


def test_an_extrapolation_is_reported_and_its_range_grows(rule: Rule) -> None:
    near = rule.expect(500_000, 1_000_000, unigram_loss=UNIGRAM)
    assert near.extrapolates is None and near.is_known
    most = expected_loss.PARAMETERS[1]
    far = rule.expect(8 * most, 1_000_000, unigram_loss=UNIGRAM)
    assert far.extrapolates == "8 times more parameters than any measured run"
    assert far.high - far.low > near.high - near.low
    few = rule.expect(500_000, 1_000_000, unigram_loss=UNIGRAM, held_out_tokens=20_000)
    assert few.high > near.high and few.low < near.low
    least = rule.expect(500_000, 40_000, unigram_loss=UNIGRAM)
    assert least.extrapolates == "10 times fewer tokens than any measured run"
    batches = rule.expect(500_000, 1_000_000, unigram_loss=UNIGRAM, batch_tokens=1 << 19)
    assert batches.extrapolates == "256 times larger batches than any measured run" and batches.high > near.high
    base = rule.expect(110e6, 2e12, unigram_loss=UNIGRAM)
    assert not base.is_known and str(base).startswith("unknown (")


@pytest.mark.runs
def test_plan_of_the_quickstart_says_the_loss(tmp_path: Path, says: Says) -> None:
    write_corpus(tmp_path, 512, tokens=500_000, median_tokens=200, longest=1000)
    data = [f"data.train={tmp_path}/train", f"data.validation={tmp_path}/train", f"data.tokenizer={tmp_path}/tokenizer"]
    said = says("plan", str(ROOT / "yamls/quickstart.yaml"), *data)
    (line,) = [line for line in said.splitlines() if line.startswith("  loss ")]
    assert line.startswith("  loss      held out ") and " expected, " in line


@pytest.mark.runs
def test_a_run_that_lies_behind_is_reported_once_and_continues(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "data", 512, tokens=500_000, median_tokens=200, longest=1000)
    folders = {"train": "train", "validation": "train", "tokenizer": "tokenizer"}
    data = [f"data.{key}={tmp_path}/data/{folder}" for key, folder in folders.items()]
    config = read_run(tiny_run(*data, "model.hidden_size=64", "eval.max_tokens=2000", "eval.samples=0"))
    progress = Progress(config.logging, config.total_tokens, visible=True)
    given = (Clock.of(config), Compute.of(config.compute), Record(None, progress), progress)
    measured = HeldOut(
        texts_of(config), *given, rule=rule_of(Clock.of(config), config.optim.name, from_scratch=config.from_scratch)
    )
    model = build_model(config.model, config.objective, config.compute)
    with torch.no_grad():
        for step in (10, 500, 600):
            entry = {"kind": "validation", "step": step, "phase": "short", "tokens": 2000 * step}
            found = measured.take(model, 0, entry)
            assert found["validation/loss"] > 5
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: held-out loss")]
    assert len(said) == 1 and "above what runs of this size and tokens had" in said[0]
