"""When a checkpoint is written, case by case; tests/checkpoints/test_checkpoint.py tests which are kept.

A missed checkpoint loses up to a phase of work; one after each step slows a run down.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from modernbert_train.clock import Clock, is_pythia
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed.save_requests import SaveRequest
from modernbert_train.train.checkpointing import Due, save_due

NOBODY = SaveRequest()
PLAIN, PHASE_END = Due(phase_end=False, milestone=False), Due(phase_end=True, milestone=False)
MILESTONE, BOTH = Due(phase_end=False, milestone=True), Due(phase_end=True, milestone=True)


PHASE = "row_tokens: 8, batch_rows: 2, microbatch_tokens: 8"
PLAIN_RUN = (
    *("name=saving", "data.train=absent", "data.tokenizer=absent", "optim.lr=1"),
    f"phases.short={{tokens: 100, {PHASE}}}",
)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """Return phases of 100 and 60 tokens; a checkpoint every 4 steps and every 40 tokens."""
    saving = "checkpoint={interval_steps: 4, interval_tokens: 40, interval_seconds: 60}"
    return load_run([], [*PLAIN_RUN, f"phases.long={{tokens: 60, {PHASE}}}", saving])


@pytest.mark.parametrize(
    ("asked", "step", "before", "after", "rolled_back", "due"),
    [
        pytest.param(NOBODY, 1, 0, 10, False, None, id="nothing asks for one"),
        pytest.param(NOBODY, 3, 20, 30, False, None, id="a step before the interval of steps"),
        pytest.param(NOBODY, 4, 25, 35, False, PLAIN, id="the interval of steps"),
        pytest.param(NOBODY, 5, 35, 39, False, None, id="a step after it"),
        pytest.param(NOBODY, 8, 60, 70, False, PLAIN, id="the interval of steps a second time"),
        pytest.param(NOBODY, 5, 30, 39, False, None, id="a token before the interval of tokens"),
        pytest.param(NOBODY, 5, 30, 40, False, MILESTONE, id="at the interval of tokens"),
        pytest.param(NOBODY, 5, 30, 55, False, MILESTONE, id="beyond the interval of tokens"),
        pytest.param(NOBODY, 5, 40, 50, False, None, id="the step that begins at the interval"),
        pytest.param(NOBODY, 5, 30, 99, False, MILESTONE, id="two intervals in a step are one checkpoint"),
        pytest.param(NOBODY, 9, 85, 99, False, None, id="a token before the end of a phase"),
        pytest.param(NOBODY, 9, 90, 100, False, PHASE_END, id="at the end of a phase"),
        pytest.param(NOBODY, 9, 90, 119, False, PHASE_END, id="past the end of a phase"),
        pytest.param(NOBODY, 9, 100, 110, False, None, id="the first step of a phase"),
        pytest.param(NOBODY, 17, 121, 159, False, None, id="a token before the end of the run"),
        pytest.param(NOBODY, 17, 150, 165, False, BOTH, id="the end of the run, which is a milestone here"),
        pytest.param(NOBODY, 8, 90, 120, False, BOTH, id="steps, tokens and the end of a phase are one checkpoint"),
        pytest.param(NOBODY, 4, 30, 40, False, MILESTONE, id="steps and tokens at once are kept for good"),
        pytest.param(SaveRequest(overdue=True), 1, 0, 10, False, PLAIN, id="too much time has passed"),
        pytest.param(SaveRequest(stop=True), 1, 0, 10, False, PLAIN, id="a signal"),
        pytest.param(SaveRequest(True, True), 1, 0, 10, False, PLAIN, id="a signal and the time at once"),
        pytest.param(SaveRequest(stop=True), 5, 30, 40, False, MILESTONE, id="a signal at a milestone"),
        pytest.param(NOBODY, 1, 0, 10, True, PLAIN, id="weights of an earlier checkpoint"),
        pytest.param(NOBODY, 9, 90, 100, True, PHASE_END, id="rolled back at the end of a phase"),
    ],
)  # fmt: skip
def test_when_a_checkpoint_is_due(
    config: RunConfig, asked: SaveRequest, step: int, before: int, after: int, rolled_back: bool, due: Due | None
) -> None:
    assert save_due(config.checkpoint, Clock.of(config), asked, step, before, after, rolled_back=rolled_back) == due


def test_the_milestones_of_pythia_are_those_of_its_paper() -> None:
    """Step 0 is saved before the first step; 154 checkpoints of 143,000 steps."""
    assert [step for step in range(4000) if is_pythia(step)] == [
        *(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        *(1000, 2000, 3000),
    ]
    assert sum(map(is_pythia, range(143_001))) == 154


def test_milestones_are_kept_for_good(config: RunConfig) -> None:
    asked = replace(config, checkpoint=replace(config.checkpoint, interval_steps=None, milestones="pythia"))
    due = {
        step: save_due(asked.checkpoint, Clock.of(asked), NOBODY, step, 41, 42, rolled_back=False)
        for step in (1, 2, 3, 512, 1000)
    }
    assert due == {1: MILESTONE, 2: MILESTONE, 3: None, 512: MILESTONE, 1000: MILESTONE}


@pytest.mark.parametrize("step", [1, 4, 8])
def test_without_intervals_only_ends_of_phases_are_due(step: int) -> None:
    plain = load_run([], PLAIN_RUN)
    assert save_due(plain.checkpoint, Clock.of(plain), NOBODY, step, 30, 90, rolled_back=False) is None
    assert save_due(plain.checkpoint, Clock.of(plain), NOBODY, step, 30, 100, rolled_back=False) == PHASE_END
