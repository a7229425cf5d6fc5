"""Which microbatches fit a GPU, and the choice for a run that leaves them open.

If this breaks, a run is refused that would have fitted, runs out of memory after its ranks have joined, or trains at
half of its GPUs' speed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from modernbert_train.cli.arguments import read_run
from modernbert_train.config.schema import ClassifyConfig, ModernBertConfig, PhaseConfig, RunConfig
from modernbert_train.plan.cost import bill_of
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import make_plan
from modernbert_train.plan.memory import usable_bytes
from modernbert_train.plan.memory_fit import configured_memory, even_rows, predicts, too_large
from modernbert_train.plan.speed_settings import SLOWER, RunGpus, on_gpu
from tests.support.paths import ROOT

H100 = RunGpus("NVIDIA H100 80GB HBM3", 85_000_000_000)
SMALL = RunGpus("RTX 3070", 8_000_000_000)
OPEN = [f"phases.{name}.microbatch_tokens=null" for name in ("stable", "context", "decay")]


@cache
def run(recipe: str, *overrides: str) -> RunConfig:
    return read_run([str(ROOT / f"yamls/recipes/{recipe}.yaml"), "data.train=absent/train", *overrides])


@pytest.mark.parametrize("gpu", [H100, RunGpus("RTX 3060", 12_000_000_000), GPUS["rtx4090"]])
def test_a_microbatch_that_nobody_gives_is_the_largest_that_fits_with_a_reserve(gpu: RunGpus) -> None:
    """As large as a reserve of 8 % and 1.5 GB allows, among the cuts without a smaller last microbatch."""
    config = on_gpu(run("modernbert-base", *OPEN), gpu, 8)
    for name, phase in config.phases.items():
        rows = phase.microbatch_rows
        assert configured_memory(config, name, gpu, 8).peak <= usable_bytes(gpu)
        assert all(-(-size // 8) % rows == 0 for size in phase.batch_sizes if -(-size // 8) >= rows)
    doubled = read_run([str(ROOT / "yamls/recipes/modernbert-base.yaml"), "data.train=absent/train",
                        *(f"phases.{name}.microbatch_tokens={2 * phase.tokens_at_once}"
                          for name, phase in config.phases.items())])  # fmt: skip
    doubled = on_gpu(doubled, gpu, 8)
    assert all(configured_memory(doubled, name, gpu, 8).peak > usable_bytes(gpu) for name in config.phases)
    given = on_gpu(run("modernbert-base"), gpu, 8)
    assert [phase.microbatch_tokens for phase in given.phases.values()] == [98_304] * 3, "the recipe's values"


@pytest.mark.parametrize(
    ("rows", "ranks", "most", "expected"),
    [(576, 1, 130, 96 + 48), (576, 1, 100, 96), (7, 1, 4, 4), (577, 1, 100, 97), (8, 2, 100, 4), (9, 1, 1, 1)],
)
def test_a_step_is_cut_evenly(rows: int, ranks: int, most: int, expected: int) -> None:
    """A smaller last microbatch is compiled separately; a prime number of rows must not lead to single rows."""
    found = even_rows(PhaseConfig(tokens=1, row_tokens=8, batch_rows=rows), ranks, most)
    assert found == (expected if expected <= most else 96) and found <= most


def test_memory_of_other_encoders_and_of_frozen_ones_is_not_guessed() -> None:
    """One row is slow; a guess would run out of memory, or refuse a run that fits."""
    bert = run("bert-base", *(f"phases.{name}.microbatch_tokens=null" for name in run("bert-base").phases))
    assert not predicts(bert) and not [*too_large(bert, SMALL, 8)]
    taken = on_gpu(bert, H100, 8)
    assert all(phase.tokens_at_once == phase.row_tokens for phase in taken.phases.values())
    base = run("modernbert-base")
    frozen = ClassifyConfig(labels=("a", "b"), freeze=True)
    assert predicts(base) and not predicts(replace(base, objective=frozen))


def test_what_is_beyond_the_gpu_is_refused_with_the_number_that_fits() -> None:
    """modernbert-large, not compiled: 88 GB of 85; the microbatch that the message names fits."""
    eager = run("modernbert-large", "compute.compile=false", "optim.fused=false")
    said = [*too_large(on_gpu(eager, H100, 8), H100, 8)]
    first = re.fullmatch(
        r"phases\.stable\.microbatch_tokens=57344: needs 88\.\d GB of a GPU by `plan`, and NVIDIA H100 80GB HBM3 has "
        r"85\.0 GB\. Set phases\.stable\.microbatch_tokens=(\d+) or compute\.compile=true or .*checkpointing=true\.",
        said[0],
    )
    assert first is not None
    keys = [each.partition(".microbatch")[0] for each in said]
    numbers = [re.search(r"Set \S+=(\d+)", each)[1] for each in said]  # type: ignore[index]
    mended = run("modernbert-large", "compute.compile=false",
                 *(f"{key}.microbatch_tokens={number}" for key, number in zip(keys, numbers, strict=True)))  # fmt: skip
    assert not [*too_large(on_gpu(mended, H100, 8), H100, 8)]


def test_a_teacher_that_alone_is_beyond_the_gpu_is_refused_whatever_learns_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for a BERT, whose memory is not predicted; sharded over ranks the teacher takes little."""
    monkeypatch.setattr(
        "modernbert_train.weights.names.architecture_of", lambda name: ModernBertConfig(num_layers=2000)
    )
    given = [str(ROOT / "yamls/recipes/distilbert.yaml"), "objective.kl_weight=0"]
    (said,) = too_large(on_gpu(read_run([*given]), SMALL, 8), SMALL, 8)
    assert re.fullmatch(
        r"objective\.teacher=google-bert/bert-base-uncased: its weights take \d+\.\d GB of a GPU, and .* GB\. Set "
        r"distributed\.strategy=fsdp2, whose ranks share it, or name a smaller one\.",
        said,
    )
    shared = read_run([*given, "distributed.strategy=fsdp2"])
    assert not [*too_large(on_gpu(shared, SMALL, 8), SMALL, 8)]


@pytest.mark.runs
def test_recipes_fit_80_gb_as_they_are() -> None:
    for recipe in ("modernbert-base", "modernbert-large", "ettin-17m", "ettin-150m", "ettin-400m", "ettin-1b"):
        config = on_gpu(run(recipe), H100, 8)
        for name in config.phases:
            assert configured_memory(config, name, H100, 8).peak <= usable_bytes(H100), (recipe, name)


def test_nothing_is_refused_that_is_within_the_gpu() -> None:
    """The reserve covers unpredicted memory; it is not a reason to refuse."""
    config = on_gpu(run("modernbert-base"), H100, 8)
    peak = configured_memory(config, "stable", H100, 8).peak
    exact, less = RunGpus("A", peak), RunGpus("A", peak - 1)
    assert peak > usable_bytes(exact) and not [*too_large(config, exact, 8)]
    assert len([*too_large(config, less, 8)]) == 3


def test_where_no_microbatch_fits_what_else_would_is_named() -> None:
    """Settings that would not suffice are not named: their user would be refused again."""

    def ends(memory_bytes: int, ranks: int, *overrides: str) -> list[str]:
        gpu = RunGpus("A", memory_bytes)
        said = too_large(on_gpu(run("ettin-1b", *OPEN, *overrides), gpu, ranks), gpu, ranks)
        return [each.partition(" GB. ")[2] for each in said]

    sharded, recomputed = "distributed.strategy=fsdp2", "compute.activation_checkpointing=true"
    both = f"Set {recomputed} and {sharded}."
    assert ends(15_000_000_000, 8) == [f"Set {sharded}.", both, both]
    assert ends(15_000_000_000, 8, sharded, recomputed) == []
    assert ends(8_000_000_000, 1) == [f"Lower phases.{name}.row_tokens, or take a larger GPU."
                                      for name in ("stable", "context", "decay")]  # fmt: skip


def test_the_smallest_gpu_decides_for_all() -> None:
    """A rank with another microbatch would read other rows than its neighbours."""
    lacking = RunGpus("B", 50, 4, True, ("Triton", "gcc"))
    found = RunGpus.of_ranks([RunGpus("A", 100, 4), lacking, RunGpus("C", 70, 4, False, ("gcc",))])
    assert found == RunGpus("B", 50, 4, False, ("Triton", "gcc"))


@pytest.mark.runs
def test_what_it_costs_to_compile_nothing_is_as_documented() -> None:
    plan = make_plan(run("modernbert-base"), 8)
    eager = make_plan(run("modernbert-base", "compute.compile=false", "optim.fused=false"), 8)
    slower = bill_of(eager.on("h100"), "h100", {}).seconds / bill_of(plan.on("h100"), "h100", {}).seconds
    assert round(slower, 1) == SLOWER
