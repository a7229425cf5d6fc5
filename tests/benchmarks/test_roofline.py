"""The roofline by kernel: what was counted on the null device agrees with what `plan` takes it to be.

If this breaks, `plan` predicts hours and dollars from bytes or FLOPs that the model no longer has.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.roofline import FORMS, NOW, RECORDED, ROWS, SIZES, Case, main, parts, predicted, read_case, seconds
from modernbert_train.plan.gpus import GPUS


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


@pytest.fixture(scope="module")
def cases(recorded: dict[str, Any]) -> list[Case]:
    return [read_case(recorded, size, row, form) for size in SIZES for row in ROWS for form in FORMS]


def test_the_products_that_were_counted_are_those_that_plan_counts(cases: list[Case]) -> None:
    """FLOPs that a device was asked for, beside those of the census: 3 passes of the layers and of the head."""
    for case in cases:
        assert case.product_flops == pytest.approx(3 * (case.flops.layers + case.flops.head), rel=0.01), case.title


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_plan_is_near_the_sum_over_kernels(cases: list[Case], gpu: str) -> None:
    """`plan` has two numbers for the bytes of a token in a layer; the kernels themselves agree within a tenth."""
    for case in cases:
        assert case.tokens / seconds(case, GPUS[gpu], NOW) == pytest.approx(predicted(case, gpu), rel=0.1), case.title


def test_twice_the_tokens_take_twice_the_time_but_for_weights(cases: list[Case]) -> None:
    for case in cases:
        once, twice = (parts(replace(case, tokens=n * case.tokens), GPUS["h100"], NOW) for n in (1, 2))
        for name in once:
            factor = 1 if name == "casts and gradients of weights" else 2
            assert twice[name] == pytest.approx(factor * once[name]), name


def test_the_tables_are_printed_for_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpu", "h100", "h200", "--most", "3"])
    printed = capsys.readouterr().out
    assert "## H100 SXM: milliseconds" in printed and "## H200: milliseconds" in printed
    assert "beside the published average" in printed and "beside the goal after that" in printed
    with pytest.raises(SystemExit):
        main(["--memory", "1.5"])
    assert "--memory 1.5: a share is above 0 and at most 1" in capsys.readouterr().err
