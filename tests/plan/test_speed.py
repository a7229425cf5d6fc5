"""Hours and advice: predictions compared with published figures, and advice that keeps its promises."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import mean
from typing import Any

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import (
    ComputeConfig,
    MaskedLmConfig,
    ModernBertConfig,
    StableAdamWConfig,
)
from modernbert_train.plan.advice import settings
from modernbert_train.plan.attended_keys import mean_tiles
from modernbert_train.plan.census import census
from modernbert_train.plan.cost import bill_of
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.make import Plan, make_plan
from modernbert_train.plan.memory import usable_bytes
from modernbert_train.plan.memory_fit import phase_memory
from modernbert_train.plan.speed import (
    EXPECTED,
    FASTEST,
    PLANNED_TOKENS_PER_SECOND,
    PUBLISHED,
    SLOWEST,
    Work,
    microbatch_seconds,
    parts,
    product_seconds,
)
from tests.support.paths import ROOT


@cache
def base(*overrides: str, ranks: int = 8) -> Plan:
    """Return the plan of phase 1 of ModernBERT-base without its data."""
    words = [str(ROOT / "yamls/recipes/modernbert-base/1-stable.yaml"), "data.train=absent/train", *overrides]
    return make_plan(read_run(words), ranks)


def work(row_tokens: int = 1024, model: ModernBertConfig | None = None, **compute: Any) -> Work:
    """Return a compiled microbatch of rows with one document each."""
    model, objective = model or ModernBertConfig(), MaskedLmConfig(mask_rate=0.3)
    tiles, optim = mean_tiles([row_tokens], census(model)), StableAdamWConfig(lr=1.0)
    settings = ComputeConfig(**{"compile": True, **compute})
    return Work(model, objective, settings, optim, row_tokens, tiles, row_tokens, fill=1.0)


def test_a_product_takes_what_its_flops_or_its_bytes_take() -> None:
    """By hand, on an H100 of 989 TFLOP/s and 3.35 TB/s. Wi of base: 2 x 98,304 x 2,304 x 768 = 347.9 GFLOP, three
    times, at 0.8 x 768 / 1,068, 0.8 x 2,304 / 2,604 and 0.8 x 98,304 / 98,604 of the peak. With a width of 128 the
    bytes take longer: 98,304 x 256 numbers and 128 x 128 of the weight, 2 bytes each, three times, at 75 % of the
    memory's rate."""
    gpu = GPUS["h100"]
    milliseconds = [347.892e9 / share / 989e9 for share in (0.57528, 0.70783, 0.79757)]
    assert 1e3 * product_seconds(gpu, 98_304, 2304, 768) == pytest.approx(sum(milliseconds), rel=1e-4)
    again = 1e3 * product_seconds(gpu, 98_304, 2304, 768, forwards=2)
    assert again == pytest.approx(sum(milliseconds) + milliseconds[0], rel=1e-4)
    moved = 2 * (98_304 * 256 + 128 * 128) / (0.75 * 3.35e12)
    flops = 2 * 98_304 * 128 * 128 / 989e12 / (0.8 * 128 / 428)
    assert flops < moved == pytest.approx(product_seconds(gpu, 98_304, 128, 128) / 3, rel=1e-6)


def test_the_parts_of_a_microbatch_of_base_by_hand() -> None:
    """Half of its attention's time is in 14 local layers, each of which computes 352 keys where a token sees 125."""
    found = parts("h100", work(), 98_304)
    of_key = 3 * 98_304 * 4 * 768 / 0.262 / 989e12
    assert found["attention, global"] == pytest.approx(8 * of_key * (1024 + 195))
    assert found["attention, local"] == pytest.approx(14 * of_key * (352 + 195))
    assert found["attention, empty blocks"] == 0
    assert found["elementwise, layers"] == pytest.approx(98_304 * 22 * (80 * 768 + 16 * 1152) / (0.75 * 3.35e12))
    halved = parts("h100", work(residual_precision="bf16"), 98_304)
    assert halved["elementwise, layers"] == pytest.approx(98_304 * 22 * (58 * 768 + 16 * 1152) / (0.75 * 3.35e12))
    assert found["loss"] == pytest.approx(8 * 98_304 * 0.3 * 50_368 / (0.75 * 3.35e12))
    assert found["casts and sums of weights"] == pytest.approx(24 * 149_655_232 / (0.75 * 3.35e12))


def test_short_documents_in_long_rows_cost_empty_blocks() -> None:
    """One of 8,192 tokens among documents of 300 makes a grid of 64 blocks for each, of which three have work."""
    lengths = [300] * 250 + [8192]
    short = replace(work(8192), tiles=mean_tiles(lengths, census(ModernBertConfig())), sequence_tokens=mean(lengths))
    found = parts("h100", short, 98_304)
    sequences = 98_304 / mean(lengths)
    working = sum(-(-n // 128) for n in lengths) / len(lengths)
    empty = 2 * 22 * 12 * sequences * (64 - working) * 1e-6 / 132
    assert found["attention, empty blocks"] == pytest.approx(empty)
    assert 0.1 < empty / sum(found.values()) < 0.3


def test_a_microbatch_takes_the_host_what_was_counted() -> None:
    """19 ms for base on the null device, 29 to 34 under DDP; a microbatch of a few rows takes no less."""
    few = [1e3 * microbatch_seconds("h100", work(), 1024, pace) for pace in (FASTEST, EXPECTED, SLOWEST)]
    assert few == pytest.approx([9.7, 19.4, 34.3], abs=0.9)
    assert microbatch_seconds("h100", work(), 98_304) == pytest.approx(
        PUBLISHED.device * sum(parts("h100", work(), 98_304).values())
    )


def test_flash_attention_3_is_what_flash_means_on_hopper() -> None:
    both, long = work(8192, attention="flash"), work(8192, attention="varlen", global_attention="flash")
    for gpu, gains in (("h100", True), ("a100", False)):
        plain, of_all, of_global = (parts(gpu, each, 98_304) for each in (work(8192), both, long))
        assert (of_all["attention, global"] < 0.65 * plain["attention, global"]) is gains
        assert (of_all["attention, local"] < plain["attention, local"]) is gains
        assert of_global["attention, global"] == of_all["attention, global"]
        assert of_global["attention, local"] == plain["attention, local"]


@pytest.mark.parametrize(
    ("width", "layers", "hidden", "row_tokens", "published"),
    [
        (768, 22, 1152, 1024, 305_000),
        (768, 22, 1152, 8192, 218_000),
        (1024, 28, 2624, 1024, 140_000),
        (1024, 28, 2624, 8192, 108_000),
    ],
)
def test_each_published_phase_of_modernbert_is_met(
    width: int, layers: int, hidden: int, row_tokens: int, published: float
) -> None:
    """ModernBERT's own program on 8 H100, tokens a second of one (arXiv 2412.13663, AnswerDotAI/ModernBERT issue 236).
    The fit uses whole runs only; their phases at 1,024 and 8,192 tokens verify the attention times."""
    model = ModernBertConfig(hidden_size=width, num_layers=layers, num_heads=width // 64, intermediate_size=hidden)
    theirs = work(row_tokens, model, attention="varlen", global_attention="flash")
    rate = 98_304 / microbatch_seconds("h100", theirs, 98_304, PUBLISHED)
    assert rate == pytest.approx(published, rel=0.07)


@pytest.mark.runs
def test_the_range_holds_the_published_hours_of_every_run_of_such_a_program() -> None:
    """246 hours for base and 528 for large on 8 H100: a user who books a node for the plan's time must be able to
    finish."""
    for recipe, ranks, hours in (
        ("modernbert-base", 8, 246),
        ("modernbert-large", 8, 528),
        ("ettin-17m", 4, 141),
        ("ettin-1b", 4, 2170),
    ):
        words = [str(ROOT / f"yamls/recipes/{recipe}.yaml"), "data.train=absent/train", "compute.compile=true"]
        bill = bill_of(make_plan(read_run([*words, "optim.fused=true"]), ranks), "h100", {})
        low, high = (seconds / 3600 for seconds in bill.between)
        assert low < hours < high and low < bill.seconds / 3600 < high


def test_small_microbatches_wait_for_launches() -> None:
    """A quickstart is no faster on a B200 than on an RTX 4090: its kernels are shorter than their launch. The time of
    updates depends on the memory's rate."""
    words = [str(ROOT / "yamls/quickstart.yaml"), "data.train=absent/train", "optim.fused=true"]
    plan = make_plan(read_run(words), ranks=1)
    fast, slow = (plan.phase_seconds(name, plan.phases[0]) for name in ("b200", "rtx4090"))
    assert fast == pytest.approx(slow, rel=0.1)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("gpu", "overrides"), [("h100", []), ("rtx4090", ["compute.compile=true", "compute.activation_checkpointing=true"])]
)
def test_advice_fits_divides_and_is_the_largest(gpu: str, overrides: list[str]) -> None:
    plan = base(*overrides)
    (phase,) = plan.phases
    room = usable_bytes(GPUS[gpu])
    own_rows = phase.config.batch_rows // plan.ranks
    found = settings(plan, phase, gpu, plan.ranks)
    assert {setting.strategy for setting in found} == {"ddp", "fsdp2"}  # a node is one shard group anyway
    for setting in found:
        rows = setting.microbatch_rows
        assert own_rows % rows == 0 and setting.microbatches == own_rows // rows
        assert setting.memory is not None and setting.memory.peak <= room
        larger = phase_memory(
            plan.config, phase.name, GPUS[gpu], setting.strategy, plan.ranks, setting.fitting_rows + 1
        )
        assert larger.peak > room or setting.fitting_rows == own_rows
        assert not any(own_rows % more == 0 for more in range(rows + 1, setting.fitting_rows + 1))


LARGE = [
    f"model.{key}={value}"
    for key, value in {"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "intermediate_size": 2624}.items()
]


@pytest.mark.runs
def test_no_step_is_shorter_than_the_planning_of_its_batch() -> None:
    """Each rank plans the whole batch. For a step of base a thousand GPUs need longer than planning; with a model of 17
    million parameters they would have to wait, and 64 would not."""
    sizes = {"hidden_size": 256, "num_layers": 7, "num_heads": 4, "intermediate_size": 384}
    small = base("compute.compile=true", *(f"model.{key}={value}" for key, value in sizes.items()))
    large = base("compute.compile=true")
    for plan, ranks, waits in ((large, 8, False), (large, 1024, False), (small, 64, False), (small, 1024, True)):
        step = settings(plan, plan.phases[0], "h100", ranks)[0].step
        assert step.planning == pytest.approx(step.tokens / PLANNED_TOKENS_PER_SECOND)
        assert (step.between[0] == step.planning) is waits


@pytest.mark.runs
def test_the_first_advice_is_the_fastest_and_ddp_where_sharding_gains_nothing() -> None:
    plan = base("compute.compile=true", *LARGE)
    (phase,) = plan.phases
    few, many = (settings(plan, phase, "h100", ranks) for ranks in (8, 512))
    assert few[0].strategy == "ddp" and few[0].step.seconds < 1.02 * few[1].step.seconds
    assert many[0].step.seconds == min(setting.step.seconds for setting in many)
    assert many[0].strategy == "hsdp"  # each rank then updates an eighth of the weights


@pytest.mark.runs
def test_the_configured_ranks_of_a_shard_are_respected() -> None:
    plan = base("distributed.strategy=hsdp", "distributed.shard_ranks=4", ranks=16)
    (phase,) = plan.phases
    of_four, of_all = (phase_memory(plan.config, phase.name, GPUS["h100"], s, 16, 1).weights for s in ("hsdp", "fsdp2"))
    assert of_four == 4 * of_all
