"""Hours and advice: predictions beside what was published, and settings that hold what they promise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import (
    BertConfig,
    CausalLmConfig,
    ComputeConfig,
    MaskedLmConfig,
    ModernBertConfig,
    StableAdamWConfig,
)
from modernbert_train.plan.advice import fits, phase_memory, settings
from modernbert_train.plan.census import census
from modernbert_train.plan.cost import bill_of
from modernbert_train.plan.flops import flops_per_token, mean_spans
from modernbert_train.plan.gpus import (
    GPUS,
    PUBLISHED,
    ROOFLINE_ERRORS,
    Publication,
    find_published,
    longer_by,
    size_class,
)
from modernbert_train.plan.make import Plan, make_plan
from modernbert_train.plan.memory import usable_bytes
from modernbert_train.plan.speed import PLANNED_TOKENS_PER_SECOND, Work, microbatch_seconds

ROOT = Path(__file__).parents[2]


def base(*overrides: str, ranks: int = 8) -> Plan:
    """Phase 1 of ModernBERT-base without its data."""
    words = [str(ROOT / "yamls/recipes/modernbert-base/1-stable.yaml"), "data.train=absent/train", *overrides]
    return make_plan(read_run(words), ranks)


@pytest.mark.parametrize("found", PUBLISHED, ids=lambda m: f"{m.gpu}-{m.hidden_size}-{m.row_tokens}")
def test_the_shares_of_the_roofline_fit_the_runs_they_were_chosen_by(found: Publication) -> None:
    model = ModernBertConfig(
        hidden_size=found.hidden_size,
        num_layers=found.num_layers,
        num_heads=found.hidden_size // 64,
        intermediate_size=found.intermediate_size,
    )
    counted, objective = census(model), MaskedLmConfig(mask_rate=0.3)
    flops = flops_per_token(counted, mean_spans([found.row_tokens], counted), {"tokens": 0.3})
    optim = StableAdamWConfig(lr=1.0)
    work = Work(model, objective, ComputeConfig(compile=True), optim, found.row_tokens, flops, fill=1.0)
    rate = 98_304 / microbatch_seconds(found.gpu, work, 98_304)
    assert -0.065 < rate / found.tokens_per_second - 1 < 0.215


RECIPES = {  # of the published runs: GPUs and tokens a second of one, from the published hours
    "ModernBERT-base": ("modernbert-base", 8, 285e3),
    "ModernBERT-large": ("modernbert-large", 8, 133e3),
    "Ettin 17M": ("ettin-17m", 4, 985e3),
    "Ettin 32M": ("ettin-32m", 4, 655e3),
    "Ettin 68M": ("ettin-68m", 4, 463e3),
    "Ettin 150M": ("ettin-150m", 4, 296e3),
    "Ettin 400M": ("ettin-400m", 4, 146e3),
    "Ettin 1B": ("ettin-1b", 4, 64e3),
}


@pytest.mark.runs
@pytest.mark.parametrize("run", RECIPES)
def test_the_errors_that_the_ranges_come_from_are_those_of_the_roofline(run: str) -> None:
    """A roofline that changes moves its errors, and a plan must not give the old ones."""
    recipe, ranks, published = RECIPES[run]
    words = [str(ROOT / f"yamls/recipes/{recipe}.yaml"), "data.train=absent/train", "compute.compile=true"]
    bill = bill_of(make_plan(read_run([*words, "optim.fused=true"]), ranks), "h100", {})
    (noted,) = [each.error for each in ROOFLINE_ERRORS if each.run == run]
    assert bill.tokens_per_second / published - 1 == pytest.approx(noted, abs=0.015)


def test_the_page_has_the_errors_and_the_ranges_that_the_plan_takes() -> None:
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").partition("## The roofline beside")[2]
    for each in ROOFLINE_ERRORS:
        row, *_ = re.findall(rf"^\| {each.run}\b.*\|$", results, re.MULTILINE)
        assert row.split("|")[4].strip() == f"{each.error:+.0%}".replace("%", " %")
    for model in (
        ModernBertConfig(hidden_size=384),
        ModernBertConfig(),
        ModernBertConfig(hidden_size=1024),
        ModernBertConfig(vocab_size=256_000),
    ):
        low, high = longer_by(model)
        (row,) = re.findall(rf"^\| {size_class(model)}\b.*\|$", page, re.MULTILINE)
        assert f"{low:.2f} to {high:.2f} times" in row


@pytest.mark.runs
def test_the_range_holds_the_published_hours_of_every_compiled_run() -> None:
    """246 hours for base and 528 for large on 8 H100: who books a node for the plan's time must be able to finish."""
    for recipe, ranks, hours in (
        ("modernbert-base", 8, 246),
        ("modernbert-large", 8, 528),
        ("ettin-17m", 4, 141),
        ("ettin-32m", 4, 212),
        ("ettin-1b", 4, 2170),
    ):
        words = [str(ROOT / f"yamls/recipes/{recipe}.yaml"), "data.train=absent/train", "compute.compile=true"]
        bill = bill_of(make_plan(read_run([*words, "optim.fused=true"]), ranks), "h100", {})
        low, high = (factor * bill.seconds / 3600 for factor in bill.longer_by)
        assert 0.98 * low < hours < 1.02 * high


@pytest.mark.runs
def test_more_bandwidth_more_speed_and_eager_is_slower() -> None:
    compiled, eager = base("compute.compile=true"), base()
    times = [compiled.phase_seconds(name, compiled.phases[0]) for name in ("b200", "h200", "a100", "rtx4090")]
    assert times == sorted(times)
    assert eager.phase_seconds("h200", eager.phases[0]) > 1.5 * times[1]


def test_small_microbatches_wait_for_launches() -> None:
    """A quickstart is no faster on a B200 than on an RTX 4090: its kernels are shorter than their launch. Updates are
    left to few bytes, which take longer where memory is slow."""
    words = [str(ROOT / "yamls/quickstart.yaml"), "data.train=absent/train", "optim.fused=true"]
    plan = make_plan(read_run(words), ranks=1)
    fast, slow = (plan.phase_seconds(name, plan.phases[0]) for name in ("b200", "rtx4090"))
    assert fast == pytest.approx(slow, rel=0.1)


@pytest.mark.runs
@pytest.mark.parametrize("overrides", [[], ["compute.compile=true"], ["compute.activation_checkpointing=true"]])
@pytest.mark.parametrize("gpu", ["h100", "rtx4090"])
def test_advice_fits_divides_and_is_the_largest(gpu: str, overrides: list[str]) -> None:
    plan = base(*overrides)
    (phase,) = plan.phases
    room = usable_bytes(GPUS[gpu])
    own_rows = phase.config.batch_rows // plan.ranks
    found = settings(plan, phase, gpu, plan.ranks)
    assert {setting.strategy for setting in found} == {"ddp", "fsdp2"}  # a node is one shard group already
    for setting in found:
        rows = setting.microbatch_rows
        assert own_rows % rows == 0 and setting.microbatches == own_rows // rows
        assert setting.memory is not None and setting.memory.peak <= room
        larger = phase_memory(plan, phase, gpu, setting.strategy, plan.ranks, setting.fitting_rows + 1)
        assert larger.peak > room or setting.fitting_rows == own_rows
        assert not any(own_rows % more == 0 for more in range(rows + 1, setting.fitting_rows + 1))


@pytest.mark.runs
def test_no_advice_where_nothing_fits() -> None:
    huge = ["model.hidden_size=8192", "model.num_heads=128", "model.intermediate_size=32768"]
    plan = base(*huge, ranks=1)
    assert settings(plan, plan.phases[0], "rtx4090", 1) == []
    assert not fits(plan, plan.phases[0], "rtx4090")


LARGE = [
    f"model.{key}={value}"
    for key, value in {"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "intermediate_size": 2624}.items()
]


@pytest.mark.runs
def test_no_step_is_shorter_than_the_planning_of_its_batch() -> None:
    """Each rank plans the whole batch. A thousand GPUs need longer for a step of base than that takes; with a model of
    17 million parameters they would wait, and 64 would not."""
    sizes = {"hidden_size": 256, "num_layers": 7, "num_heads": 4, "intermediate_size": 384}
    small = base("compute.compile=true", *(f"model.{key}={value}" for key, value in sizes.items()))
    large = base("compute.compile=true")
    for plan, ranks, waits in ((large, 8, False), (large, 1024, False), (small, 64, False), (small, 1024, True)):
        step = settings(plan, plan.phases[0], "h100", ranks)[0].step
        assert step.planning == pytest.approx(step.tokens / PLANNED_TOKENS_PER_SECOND)
        assert (step.seconds == step.planning > step.compute + step.sent.exposed) is waits


@pytest.mark.runs
def test_the_first_advice_is_the_fastest_and_ddp_where_sharding_gains_nothing() -> None:
    plan = base("compute.compile=true", *LARGE)
    (phase,) = plan.phases
    few, many = (settings(plan, phase, "h100", ranks) for ranks in (8, 512))
    assert few[0].strategy == "ddp" and few[0].step.seconds < 1.02 * few[1].step.seconds
    assert many[0].step.seconds == min(setting.step.seconds for setting in many)
    assert many[0].strategy == "hsdp"  # each rank then updates an eighth of the weights


@pytest.mark.runs
def test_hsdp_beats_fsdp2_on_many_nodes() -> None:
    """A ring over a thousand GPUs waits for a thousand hops in every call."""
    plan = base("compute.compile=true")
    found = {setting.strategy: setting.step.efficiency for setting in settings(plan, plan.phases[0], "h100", 1024)}
    assert found["ddp"] >= found["hsdp"] > 2 * found["fsdp2"]


@pytest.mark.runs
def test_the_configured_ranks_of_a_shard_are_respected() -> None:
    plan = base("distributed.strategy=hsdp", "distributed.shard_ranks=4", ranks=16)
    (phase,) = plan.phases
    of_four, of_all = (phase_memory(plan, phase, "h100", s, 16, 1).weights for s in ("hsdp", "fsdp2"))
    assert of_four == 4 * of_all


def test_a_publication_is_for_one_shape_only() -> None:
    """Half the layers must not be shown beside the speed of all."""
    shape, compiled, eager = ModernBertConfig(), ComputeConfig(compile=True), ComputeConfig()
    mlm = MaskedLmConfig()
    assert find_published("h100", shape, mlm, compiled, 1024) is not None
    assert find_published("h100", replace(shape, num_layers=10), mlm, compiled, 1024) is None
    assert find_published("h100", shape, mlm, eager, 1024) is None
    assert find_published("h200", shape, mlm, compiled, 1024) is None
    assert find_published("h100", shape, mlm, compiled, 512) is None


def test_a_publication_is_for_one_architecture_and_objective_only() -> None:
    """Of the same sizes, but with every token predicted from those before it, or with other layers."""
    sizes = {"vocab_size": 50368, "num_layers": 22, "intermediate_size": 1152}
    compiled = ComputeConfig(compile=True)
    assert find_published("h100", ModernBertConfig(), CausalLmConfig(), compiled, 1024) is None
    assert find_published("h100", BertConfig(**sizes), MaskedLmConfig(), compiled, 1024) is None
