"""The one call that a rented GPU gets. If it stops half way, the figures of an hour's rent are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_session import STEPS, Step, run_steps, summary
from benchmarks.train_step import PRESETS


@pytest.mark.runs
def test_a_step_that_fails_hangs_or_does_not_fit_leaves_the_others_alone(tmp_path: Path) -> None:
    steps = (
        Step("wrong", "timeit -n x", 30),
        Step("hangs", "timeit -n 1 -r 1 -s 'import time' time.sleep(60)", 2),
        Step("works", "timeit -n 1 -r 1 pass", 30),
    )
    outcomes = run_steps(steps, tmp_path, 60)
    assert [outcome for _, outcome, _ in outcomes] == ["failed with 1", "stopped after 2 s", "ok"]
    assert run_steps(steps, tmp_path, 5)[0][1] == "skipped"
    text = summary(outcomes, tmp_path)
    assert "| hangs | `python -m timeit" in text and "best of 1" in text


def test_the_steps_name_cases_that_exist() -> None:
    """A step that ends with a usage error tells nothing, and the GPU is rented all the same."""
    names = {step.name for step in STEPS}
    assert len(names) == len(STEPS) and sum(step.seconds for step in STEPS[:3]) <= 8 * 60
    for step in STEPS:
        words = step.words.split()
        if words[0] == "benchmarks.train_step" and "--only" in words:
            cases = words[words.index("--only") + 1 :]
            cases = cases[: next((i for i, word in enumerate(cases) if word.startswith("--")), len(cases))]
            assert cases and set(cases) <= set(PRESETS["gpu"])
        if words[0] == "benchmarks.tuned":
            assert words[1] in PRESETS["gpu"]
