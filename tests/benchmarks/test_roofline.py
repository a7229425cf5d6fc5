"""The roofline by kernel: counts on the null device agree with `plan`'s assumptions.

If this breaks, `plan` predicts hours and dollars from bytes or FLOPs that the model no longer has.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.roofline import FORMS, RECORDED, ROWS, SIZES, Case, main, parts, read_case
from modernbert_train.plan import speed
from modernbert_train.plan.parameters import count_parameters


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


@pytest.fixture(scope="module")
def cases(recorded: dict[str, Any]) -> list[Case]:
    return [read_case(recorded, size, row, form) for size in SIZES for row in ROWS for form in FORMS]


@pytest.mark.runs
def test_the_products_that_were_counted_are_those_that_plan_counts(cases: list[Case]) -> None:
    """FLOPs that a device received, compared with the census: a forward pass and two gradients for each."""
    for case in cases:
        shapes = case.work.products(case.tokens)
        flops = sum(6 * each.numbers * each.uses * each.passes * positions for each, positions in shapes)
        assert case.product_flops * case.tokens == pytest.approx(flops, rel=0.01), case.title


def test_plan_takes_the_bytes_and_launches_that_were_counted(cases: list[Case]) -> None:
    """`plan` has three numbers for the bytes of a token, one for the kernels of a layer."""
    for case in cases:
        model, traffic = case.work.model, case.work.traffic
        layer = traffic.width * model.hidden_size + traffic.hidden * model.intermediate_size
        assert layer == pytest.approx(case.layer_bytes, rel=0.01), case.title
        logits = traffic.logit * case.work.objective.predicted_share * model.vocab_size
        assert logits == pytest.approx(sum(each.token_bytes for each in case.kernels if each.of_loss), rel=0.1), (
            case.title
        )
        assert case.work.kernels == pytest.approx(case.launches, rel=0.05), case.title
        weights = sum(each.other_bytes for each in case.kernels) / count_parameters(model, case.work.objective).total
        assert 8 < weights < speed.WEIGHT_BYTES, case.title  # on record is a first microbatch, which adds nothing up


def test_twice_the_tokens_take_twice_the_time_but_for_weights(cases: list[Case]) -> None:
    for case in cases:
        once, twice = (parts(replace(case, tokens=n * case.tokens), "h100") for n in (1, 2))
        for name in once:
            factor = 1 if name == "casts and sums of weights" else 2
            assert twice[name] == pytest.approx(factor * once[name], rel=0.01), name


@pytest.mark.runs
def test_the_tables_are_printed_for_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpu", "h100", "h200", "--most", "3"])
    printed = capsys.readouterr().out
    assert "## H100 SXM: milliseconds" in printed and "## H200: milliseconds" in printed
    assert "relative to the published average" in printed and "relative to the next goal" in printed
