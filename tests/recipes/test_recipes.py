"""The published recipe, as numbers and as runs: the tiny one has the same files and is trained from end to end.

If this breaks, a team launches a run of six figures that trains something else than the paper's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.clock import Clock
from modernbert_train.config.check import check
from modernbert_train.config.load import differences, load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.batch_warmup import batch_rows_at
from modernbert_train.data.mixing import phase_weights
from modernbert_train.optim.schedules import lr_at, max_lr_at, weight_decay_at
from modernbert_train.plan.parameters import count_parameters
from tests.support.reference_checkpoint import write_reference_checkpoint
from tests.support.runs import records
from tests.support.sources import MODEL

RECIPES = Path(__file__).parents[2] / "yamls/recipes"
G = 1_000_000_000
# tokens seen -> rate, decay, its maximum rate, RoPE base, rows of a batch, tokens of a row (arXiv 2412.13663, table 3)
BASE = {
    1.5 * G: (4e-4, 1e-5, 8e-4, 10_000, 768, 1024),  # half of the rate's warmup
    49 * G: (8e-4, 1e-5, 8e-4, 10_000, 3840, 1024),  # the last stage of the batch's
    51 * G: (8e-4, 1e-5, 8e-4, 10_000, 4608, 1024),
    1720 * G: (3e-4, 1e-5, 3e-4, 160_000, 576, 8192),
    1970 * G: (3e-4 * (0.001 + 0.999 * (1 - 0.02**0.5)), 1e-5, 3e-4, 160_000, 576, 8192),  # 1 of 50 G into the decay
    2019 * G: (3e-7, 1e-5, 3e-4, 160_000, 576, 8192),
}
LARGE = {
    1 * G: (2.5e-4, 1e-5, 5e-4, 10_000, 1344, 1024),
    11 * G: (5e-4, 1e-5, 5e-4, 10_000, 4928, 1024),
    901 * G: (5e-5, 1e-6, 5e-5, 10_000, 4928, 1024),
    1720 * G: (5e-5, 1e-6, 5e-5, 160_000, 616, 8192),
    1969 * G: (5e-5, 1e-6, 5e-5, 160_000, 624, 8192),
    2019 * G: (5e-8, 1e-6, 5e-5, 160_000, 624, 8192),
}


def recipe(name: str, ranks: int = 8) -> RunConfig:
    """Read a recipe that this number of ranks can train."""
    config = load_run([RECIPES / f"{name}.yaml"])
    check(config, num_ranks=ranks)
    return config


@pytest.mark.parametrize(("name", "table"), [("modernbert-base", BASE), ("modernbert-large", LARGE)])
def test_the_recipe_is_the_published_one(name: str, table: dict[float, tuple[float, ...]]) -> None:
    config = recipe(name)
    assert config.total_tokens == 2019 * G
    assert (config.objective.mask_rate, config.objective.eval_mask_rate) == (0.3, 0.15)
    assert (config.optim.betas, config.optim.eps, config.model.attention_out_dropout) == ((0.9, 0.98), 1e-6, 0.1)
    clock = Clock.of(config)
    for tokens, expected in ((int(tokens), expected) for tokens, expected in table.items()):
        now = clock.at(tokens)
        rates = lr_at(clock, tokens), weight_decay_at(clock, tokens), max_lr_at(clock, tokens)
        rows = batch_rows_at(now.phase, now.tokens), now.phase.row_tokens
        assert (*rates, now.model.global_rope_theta, *rows) == pytest.approx(expected, rel=1e-6), f"{tokens:,} tokens"


@pytest.mark.runs
@pytest.mark.parametrize("name", ["modernbert-base", "modernbert-large", "tiny"])
def test_the_phases_alone_are_the_phases_of_the_whole(name: str) -> None:
    whole = load_run([RECIPES / f"{name}.yaml"])
    parts = [load_run([file]) for file in sorted((RECIPES / name).glob("[0-9]*.yaml"))]
    assert {key: phase for part in parts for key, phase in part.phases.items()} == whole.phases
    for before, part in zip([None, *parts], parts, strict=False):
        differing = {key.split(".")[0] for key, _, _ in differences(whole, part)}
        assert differing <= {"name", "phases", "start", "weights"}
        assert (part.start is None) == (before is None)
        if part.start is not None and before is not None:
            assert part.start.checkpoint == before.folder


@pytest.mark.runs
@pytest.mark.parametrize("name", ["modernbert-base", "modernbert-large"])
def test_tiny_has_the_keys_of_the_real_one(name: str) -> None:
    """The tests' runs represent a team's launches: same files, same sections, same kinds of values."""
    real = {file.name for file in (RECIPES / name).iterdir()}
    assert real == {file.name for file in (RECIPES / "tiny").iterdir()}
    for key in ("context", "decay"):
        ours = load_run([RECIPES / "tiny.yaml"]).phases[key]
        theirs = load_run([RECIPES / "modernbert-base.yaml"]).phases[key]
        assert (ours.lr_ratio, ours.model, ours.optim) == (theirs.lr_ratio, theirs.model, theirs.optim)
        assert ours.schedule.decay == theirs.schedule.decay
        assert ours.schedule.final_lr_ratio == theirs.schedule.final_lr_ratio


def words(data: Path, runs: Path, file: str, *overrides: str) -> list[str]:
    """A recipe with a tenth of its tokens, or a thirtieth in a long phase, on the tests' own text."""
    config: RunConfig = load_run([RECIPES / file])
    shorter = []
    for name, phase in config.phases.items():
        times = 10 if phase.tokens < 100_000 else 30
        warmup, decay = phase.schedule.warmup_tokens // times, phase.schedule.decay_tokens // times
        shorter += [
            f"phases.{name}.tokens={phase.tokens // times}",
            f"phases.{name}.schedule={{warmup_tokens: {warmup}, decay_tokens: {decay}}}",
        ]
    return [
        str(RECIPES / file),
        *shorter,
        *(f"phases.{n}.batch_warmup.tokens=3000" for n, p in config.phases.items() if p.batch_warmup),
        *(f"data.{key}={data / key}" for key in ("train", "validation", "tokenizer")),
        "model.attention_out_dropout=0",  # it is keyed by the step, and a phase alone counts from 1
        *(f"runs_folder={runs}", "data.num_workers=0", "eval={interval_tokens: null, max_tokens: 1000}"),
        *("compute.device=cpu", *overrides),
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_tiny_recipe_runs_whole_and_phase_by_phase_and_grows(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words(tiny_data, tmp_path, "tiny.yaml")]) == 0
    for file, before in (("1-stable", None), ("2-context", "tiny-1-stable"), ("3-decay", "tiny-2-context")):
        start = [] if before is None else [f"start.checkpoint={tmp_path}/{before}"]
        assert main(["train", *words(tiny_data, tmp_path, f"tiny/{file}.yaml", *start)]) == 0, capsys.readouterr().err
    whole = records(tmp_path / "tiny")
    parts = [records(tmp_path / f"tiny-{name}") for name in ("1-stable", "2-context", "3-decay")]
    assert parts[0] == [entry for entry in whole if entry["phase"] == "stable"], "the first phase is the same run"
    first = next(entry for entry in whole if entry["phase"] == "context")
    assert parts[1][0]["loss"] == first["loss"], "the second continues with the same weights and the same text"
    assert parts[2][-1]["lr"] < 0.5 * parts[2][0]["lr"]
    losses = [entry["loss"] for entry in records(tmp_path / "tiny", "validation")]
    assert len(losses) >= 3 and losses[-1] < losses[0]

    grown = (f"weights.grow_from={tmp_path}/tiny-1-stable", "phases.context=null", "phases.decay=null")
    assert main(["train", *words(tiny_data, tmp_path, "tiny-large.yaml"), *grown, "phases.stable.tokens=4000"]) == 0
    start_of_large = records(tmp_path / "tiny-large", "start")[0]["from"]
    assert "hidden_size 128 -> 192, num_layers 4 -> 7" in start_of_large, start_of_large


# parameters, steps and tokens in a step of a full batch, all published; arXiv 1810.04805, 1907.11692, 2312.17482,
# 1909.11942; of distilbert the parameters alone
BERTS = {
    "bert-base": (109_514_298, 1_000_000, {"short": 256 * 128, "long": 256 * 512}),
    "roberta-base": (124_696_665, 500_000, {"main": 8192 * 512}),
    "mosaicbert": (109_518_912, 70_000, {"main": 4096 * 128}),
    "distilbert": (66_985_530, 12_500, {"main": 2048 * 512}),
    "albert-base": (11_813_810, 125_000, {"main": 4096 * 512}),
}


@pytest.mark.parametrize("name", BERTS)
def test_berts_are_trained_as_published(name: str) -> None:
    config = recipe(name)
    parameters, steps, batches = BERTS[name]
    assert count_parameters(config.model, config.objective).total == parameters
    assert {key: phase.batch_rows * phase.row_tokens for key, phase in config.phases.items()} == batches
    assert sum(phase.tokens // batches[key] for key, phase in config.phases.items()) == steps
    assert all(phase.tokens % batches[key] == 0 for key, phase in config.phases.items())
    last = config.total_tokens - 1
    assert lr_at(Clock.of(config), last) == pytest.approx(0.02 * 5e-4 if name == "mosaicbert" else 0, abs=1e-9)


ESM = {"8m": (6, 320), "35m": (12, 480), "150m": (30, 640), "650m": (33, 1280)}  # layers, width


@pytest.mark.parametrize("size", ESM)
def test_esm_is_trained_as_published(size: str) -> None:
    """500,000 steps of 2 M tokens; 15 % masked, of which 80 % are [MASK] and 10 % random, as token dropout assumes."""
    config = recipe(f"esm2-{size}")
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (*ESM[size], 20)
    assert config.model.intermediate_size == 4 * config.model.hidden_size
    batch = 2048 * 1024
    assert all(phase.batch_rows * phase.row_tokens == batch for phase in config.phases.values())
    assert config.total_tokens == 500_000 * batch
    objective = config.objective
    assert (objective.mask_rate, objective.mask_token_share, objective.random_token_share) == (0.15, 0.8, 0.1)
    rates = {1_000: 2e-4, 2_000: 4e-4, 227_000: 2.2e-4, 452_000: 4e-5, 499_999: 4e-5}
    for step, rate in rates.items():
        assert lr_at(Clock.of(config), step * batch) == pytest.approx(rate, rel=1e-3), step


# parameters as counted by hand from the published shapes, peak rate, decay, tokens of the batch's warmup
ETTIN = {
    "17m": (16_913_600, 3e-3, 3e-4, 125 * G),
    "32m": (32_081_344, 3e-3, 3e-4, 100 * G),
    "68m": (68_457_664, 3e-3, 3e-4, 75 * G),
    "150m": (149_655_232, 8e-4, 1e-5, 50 * G),
    "400m": (395_881_664, 5e-4, 1e-5, 10 * G),
    "1b": (1_031_314_112, 5e-4, 5e-5, 3 * G),
}


@pytest.mark.parametrize("size", ETTIN)
def test_ettin_is_trained_as_published(size: str) -> None:
    config = recipe(f"ettin-{size}", 4)
    parameters, rate, decay, warmup = ETTIN[size]
    assert count_parameters(config.model).total == parameters
    assert config.model.head_size == 64 and config.total_tokens == 2000 * G
    first = config.phases["stable"].batch_warmup
    assert first is not None and first.tokens == warmup
    for tokens, share, theta, masked in (
        (1000 * G, 1.0, 10_000, 0.3),
        (1700 * G, 1.0, 160_000, 0.3),
        (1950 * G - 1, 0.5, 160_000, 0.3),
        (1950 * G, 0.5, 160_000, 0.15),
        (2000 * G - 1, 0.5 * 0.04, 160_000, 0.15),
    ):
        now = Clock.of(config).at(tokens)
        assert lr_at(Clock.of(config), tokens) == pytest.approx(share * rate, rel=1e-3), f"{tokens:,} tokens"
        assert weight_decay_at(Clock.of(config), tokens) == pytest.approx(decay)
        assert (now.model.global_rope_theta, now.model.local_rope_theta) == (theta, theta)
        assert now.objective.mask_rate == masked


def test_the_rate_of_bert_is_one_line_over_both_lengths() -> None:
    """It falls to a tenth in the phase of 128 tokens and continues from there; a jump would show in the loss."""
    config = load_run([RECIPES / "bert-base.yaml"])
    border = config.phases["short"].tokens
    assert lr_at(Clock.of(config), 327_680_000) == pytest.approx(1e-4)
    before, after = (lr_at(Clock.of(config), tokens) for tokens in (border - 1, border))
    assert before == pytest.approx(1e-5, rel=1e-3) and after == pytest.approx(before, rel=1e-3)


def test_xlnet_is_trained_as_it_was_compared_with_bert() -> None:
    """Parameters of transformers' XLNetLMHeadModel, a million steps of 256 times 512 tokens, one in six predicted."""
    config = recipe("xlnet-base")
    phase = config.phases["main"]
    assert count_parameters(config.model).total == 116_750_336
    assert phase.tokens == 1_000_000 * phase.batch_rows * phase.row_tokens and phase.batch_rows * 512 == 256 * 512
    assert config.objective.predicted_share == 1 / 6
    assert lr_at(Clock.of(config), config.total_tokens - 1) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_a_run_that_begins_causal_ends_masked(tiny_data: Path, tmp_path: Path) -> None:
    assert main(["train", *words(tiny_data, tmp_path, "causal-then-masked.yaml")]) == 0
    found = records(tmp_path / "causal-then-masked")
    shares = {entry["phase"]: entry["predicted"] / entry["rows"] / entry["row_tokens"] for entry in found}
    assert shares["causal"] > 0.8 and shares["masked"] < 0.4


@pytest.mark.slow
def test_a_run_that_begins_masked_ends_by_telling_tokens(tiny_data: Path, tmp_path: Path) -> None:
    assert main(["train", *words(tiny_data, tmp_path, "masked-then-replaced.yaml")]) == 0
    found = records(tmp_path / "masked-then-replaced")
    assert {entry["phase"] for entry in found} == {"masked", "replaced"}
    assert {entry["phase"] for entry in found if "loss/rtd" in entry} == {"replaced"}


def test_continued_pretraining_begins_at_the_rate_that_the_checkpoint_was_left_with() -> None:
    """Warmed up within ten steps to the rate of the context extension; with replay, the model's context, a decay."""
    config = recipe("continue")
    context = load_run([RECIPES / "modernbert-base.yaml"])
    assert lr_at(Clock.of(config), 1 * G) == pytest.approx(lr_at(Clock.of(context), 1720 * G))
    assert config.model == Clock.of(context).at(1720 * G).model
    warmup = config.phases["adapt"].schedule.warmup_tokens
    assert 10 < warmup / (576 * 8192) < 11 and lr_at(Clock.of(config), warmup // 2) == pytest.approx(1.5e-4)
    assert lr_at(Clock.of(config), config.total_tokens - 1) == pytest.approx(3e-7, rel=1e-2)
    weights = phase_weights(config.data, config.phases["decay"], {"domain": 1, "general": 1})
    assert 0.05 <= weights["general"] / sum(weights.values()) <= 0.2
    assert (config.objective.mask_rate, config.objective.eval_mask_rate) == (0.3, 0.15)


def test_the_extension_to_32_768_tokens_scales_positions_by_the_factor_of_its_rows() -> None:
    """It continues from the context extension, with as many tokens in a step, and only global layers are scaled."""
    config = recipe("context-32k")
    before = Clock.of(load_run([RECIPES / "modernbert-base.yaml"])).at(1720 * G)
    for name, phase in config.phases.items():
        model = config.in_phase[name].modernbert
        assert phase.row_tokens == model.rope_factor * model.rope_original_tokens == 4 * before.phase.row_tokens
        assert phase.batch_rows * phase.row_tokens == before.phase.batch_rows * before.phase.row_tokens
        assert model.is_scaled(True) and not model.is_scaled(False) and model.rope_scaling == "yarn"
        assert model.thetas == before.model.thetas
    assert lr_at(Clock.of(config), 1 * G) == pytest.approx(3e-4)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_continued_pretraining_from_a_composer_file_ends_with_its_table(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = write_reference_checkpoint(tmp_path, MODEL, tiny_data / "tokenizer")
    keys = ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "local_attention")
    rows = "row_tokens: 128, batch_rows: 4, microbatch_tokens: 256"
    folders = {"streams.domain.path": "train", "streams.general.path": "train", "validation": "validation"}
    small = [
        *(f"model.{key}={getattr(MODEL, key)}" for key in keys),
        *(f"data.{key}={tiny_data}/{name}" for key, name in {**folders, "tokenizer": "tokenizer"}.items()),
        f"phases.adapt={{tokens: 2000, {rows}, schedule: {{warmup_tokens: 600}}}}",
        f"phases.decay={{tokens: 1000, {rows}, schedule: {{decay_tokens: 1000}}}}",
        *(f"weights.init_from={checkpoint}", f"evals.general.shards={tiny_data}/validation", f"runs_folder={tmp_path}"),
        *("compute={device: cpu, precision: fp32}", "data.num_workers=0", "eval.interval_tokens=null"),
    ]
    assert main(["train", str(RECIPES / "continue.yaml"), *small]) == 0
    table = capsys.readouterr().out.partition("measured on")[2].partition("next:")[0]
    assert table.count("data.validation") == 3 == table.count("evals.general"), table
