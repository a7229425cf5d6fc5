"""Derived recipes: a wrong number here is trained for days by a user who trusts it.

At a published run's tokens its values must come out; in between, the rules are computed by hand.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.check import check
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import ModernBertConfig, RunConfig
from modernbert_train.plan.recipe import (
    BY_PARAMETERS,
    SIZES,
    RunRequest,
    batches_for,
    entries_for,
    learning_rate,
    run_yaml,
    sizes_for_hours,
    tokens_for,
)
from tests.support.verbs import Says

YAMLS = Path(__file__).parents[2] / "yamls"


def loaded(asked: RunRequest, folder: Path) -> RunConfig:
    (folder / "run.yaml").write_text(run_yaml(asked), encoding="utf-8")
    return load_run([folder / "run.yaml"])


def asked(name: str, tokens: float, gpus: int = 8, **more: int) -> RunRequest:
    size = SIZES[name]
    return RunRequest("mine", size, round(tokens), more.pop("entries", size.entries), gpus, "data/mine", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gpus"), [(name, 0 if name in ("tiny", "quickstart") else 8) for name in SIZES], ids=list(SIZES)
)
def test_at_its_own_tokens_a_size_is_the_published_run(name: str, gpus: int, tmp_path: Path) -> None:
    size = SIZES[name]
    there = load_run([YAMLS / size.file])
    here = loaded(asked(name, size.run.total_tokens, gpus), tmp_path)
    check(here, max(1, gpus))
    assert isinstance(there.model, ModernBertConfig) and isinstance(here.model, ModernBertConfig)
    for key in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size", "init_std"):
        assert getattr(here.model, key) == getattr(there.model, key), key
    if size.raced:
        raced = load_run([YAMLS / "recipes/better-small.yaml"]).optim
        assert here.optim == raced
    else:
        assert here.optim == there.optim
    assert list(here.phases) == list(there.phases)
    for phase, theirs in there.phases.items():
        ours = here.phases[phase]
        assert ours.model == theirs.model and ours.objective == theirs.objective
        if name == "tiny":  # changes rates at its phases, and is otherwise a small quickstart
            continue
        assert ours.row_tokens == theirs.row_tokens and ours.lr_ratio == theirs.lr_ratio
        assert ours.tokens == pytest.approx(theirs.tokens, rel=1e-6)
        assert ours.schedule == theirs.schedule
        assert ours.batch_rows == (616 if (name, phase) == ("large", "decay") else theirs.batch_rows)  # published: 624
        if theirs.batch_warmup is not None:
            assert ours.batch_warmup == theirs.batch_warmup


def test_a_thousandth_of_the_tokens_has_a_tenth_of_the_batch() -> None:
    """(1 / 1000) ^ 0.327 is 0.1045: 493 k of 4.72 M tokens, which are 480 rows as six stages of 80 on 8 GPUs."""
    found = batches_for(asked("68m", 2e9))
    assert (found.rows, found.unit, found.long_rows, found.long_row_tokens) == (480, 80, 64, 8192)
    assert learning_rate(asked("68m", 2e9)) == 3e-3


def test_few_tokens_leave_as_many_steps_as_the_quickstart_has_and_lower_the_rate() -> None:
    """10 M tokens in 800 steps are 12,500 a step: 24 rows; the rule gave 87 k: the rate is 3e-3 * sqrt(12.3 / 87)."""
    few = asked("17m", 1e7, 0)
    assert batches_for(few).rows == 24
    assert learning_rate(few) == pytest.approx(3e-3 * math.sqrt(24 * 512 / 86_800), abs=5e-5)  # two digits


@pytest.mark.runs
def test_every_batch_divides_among_the_gpus(tmp_path: Path) -> None:
    """Otherwise `launch` would leave some idle."""
    for gpus in (1, 3, 8, 16):
        for tokens in (3e7, 3e9, 3e11):
            config = loaded(asked("17m", tokens, gpus), tmp_path)
            check(config, gpus)
            assert {rows % gpus for phase in config.phases.values() for rows in phase.batch_sizes} == {0}


def test_the_context_is_as_long_as_documents_are(tmp_path: Path) -> None:
    """Rows of 8,192 tokens of short documents cost time and teach nothing."""
    assert batches_for(asked("17m", 1e9, 1, longest=3000)).long_row_tokens == 4096
    short = loaded(asked("17m", 1e9, 1, longest=300), tmp_path)
    assert {phase.row_tokens for phase in short.phases.values()} == {1024}
    assert not any(phase.model for phase in short.phases.values())
    assert batches_for(asked("17m", 1e9, 0, longest=10**6)).long_row_tokens == 1024  # on a CPU


def test_vocabulary_and_tokens_follow_the_text() -> None:
    assert entries_for(SIZES["68m"], 1e12) == 50_368 and entries_for(SIZES["quickstart"], 1e12) == 8192
    assert entries_for(SIZES["68m"], 60e6) == 16_384  # 8,192 times the root of 60 / 12.5 are 17,948
    assert entries_for(SIZES["tiny"], 1000) == 512
    assert tokens_for(SIZES["17m"], 17_000_000, 1e12) == 340_000_000  # 20 a parameter
    assert tokens_for(SIZES["17m"], 17_000_000, 1e7) == 40_000_000  # four passes
    assert tokens_for(SIZES["base"], 150_000_000, math.inf) == 2_019_000_000_000  # the published recipe


def test_more_hours_choose_a_larger_size() -> None:
    """Speeds inverse to parameters; 17 k tokens a second for 17m."""

    def chosen(hours: float) -> str:
        speed = lambda size, entries: 3e11 / size.parameters(entries)  # noqa: E731
        return min(
            sizes_for_hours(hours, speed, lambda size: size.entries, 1e12), key=lambda found: found.loss
        ).size.name

    names = [chosen(hours) for hours in (0.01, 8, 1000, 100_000)]
    assert names == sorted(names, key=BY_PARAMETERS.index) and names[0] == "tiny" and len(set(names)) >= 3


def test_init_prints_a_run_that_check_accepts(tmp_path: Path, says: Says) -> None:
    printed = says("init", "run", "--size", "68m", "--tokens", "2B", "--gpus", "8")
    (tmp_path / "run.yaml").write_text(printed, encoding="utf-8")
    config = load_run([tmp_path / "run.yaml"])
    check(config, 8)
    assert config.total_tokens == 2_000_000_000 and config.name == "mine-68m"
    assert main(["init", "data", "--size", "68m"]) == 78 and main(["init", "run", "--tokens", "2B"]) == 78
