"""A sweep's YAML: the run's own keys and values, each mistake with its remedy, and W&B's equivalent file.

If this breaks, a typo in a space costs a night of trials that all train the same.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from launch.sweep import main
from launch.sweeps.space import make_space
from launch.sweeps.trial import figure, milestones
from modernbert_train.__main__ import main as command
from modernbert_train.config.check import check
from modernbert_train.config.load import flat
from modernbert_train.config.tools.sweep import DimensionConfig, grid_values
from modernbert_train.errors import ConfigError
from tests.support.sweeps import spec
from tests.support.tiny_run import TinyRun

READY = sorted((Path(__file__).parents[2] / "yamls/sweeps").glob("*.yaml"))


@pytest.mark.parametrize(
    ("overrides", "space", "message"),
    [
        ([], "{optim.lrr: {low: 1, high: 2}}", r"optim\.lrr \(overrides and space.*Did you mean optim\.lr\?"),
        ([], "{optim.lr: {low: 1, high: 2}, optim.betaz: {choices: [1]}}", r"Did you mean optim\.betas"),
        ([], "{compute.attention: {choices: [sdpa, sdpaa]}}", r"compute\.attention='sdpaa'.*Did you mean sdpa\?"),
        ([], "{model.num_layers: {low: 1.5, high: 4}}", r"model\.num_layers=1\.5.*whole number"),
        ([], "{model.num_layers: {low: 1, high: 4, step: 0.5}}", "step must be whole, as model.num_layers is"),
        ([], "{}", "space: empty"),
        ([], "{optim.lr: {}}", "needs choices, or low and high"),
        ([], "{optim.lr: {low: 2, high: 1}}", "low=2 is not below high=1"),
        ([], "{optim.lr: {low: 0, high: 1, log: true}}", "begins above 0"),
        ([], "{optim.lr: {low: 1, high: 2, choices: [1]}}", "has choices and low, high"),
        ([], "{optim.lr: {choices: []}}", "choices: empty"),
        ([], "{optim.lr: {choices: [1, 1]}}", "is listed twice"),
        ([], "{optim.lr: {low: 1, high: 2, points: 4}}", "only sampler=grid reads it"),
        (["sampler=grid"], "{optim.lr: {low: 1, high: 2}}", "the number of values to try"),
        ([], "{name: {choices: [a, b]}}", "every trial has its own folder"),
        ([], "{objective.eval_mask_rate: {low: 0.1, high: 0.2}}", "trials could not be compared"),
        ([], "{eval.max_tokens: {low: 10, high: 20}}", "trials could not be compared"),
        (["objective=validation.los"], "{optim.lr: {low: 1, high: 2}}", r"Did you mean validation\.loss\?"),
        (["overrides=[data.validation=null]"], "{optim.lr: {low: 1, high: 2}}", "no trial would measure it"),
        (["objective=validation.accuracy"], "{optim.lr: {low: 1, high: 2}}", "Set direction=maximize"),
        (["trials=null"], "{optim.lr: {low: 1, high: 2}}", "never ends by itself"),
        (["storage=sweep.db"], "{optim.lr: {low: 1, high: 2}}", "not a database URL"),
        (["prune.name=median"], "{optim.lr: {low: 1, high: 2}}", "the interval at which trials are compared"),
        (["prune={name: median, interval_tokens: 6000}"], "{optim.lr: {low: 1, high: 2}}", "they end at 6,000"),
        (["prune.min_tokens=5"], "{optim.lr: {low: 1, high: 2}}", "name=none"),
        (["run=[]"], "{optim.lr: {low: 1, high: 2}}", "Name the YAML of the run to vary"),
        (["run=[nowhere.yaml]"], "{optim.lr: {low: 1, high: 2}}", "nowhere.yaml: no such file"),
    ],
)
def test_mistakes_are_reported_before_any_trial(
    tiny_run: TinyRun, tmp_path: Path, overrides: list[str], space: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_space(spec(tiny_run(), tmp_path, *overrides, space=space))


def test_the_command_tells_them_with_the_exit_code_of_a_run(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec(tiny_run(), tmp_path)
    file = str(tmp_path / "sweep.yaml")
    assert main([file, "sampler=tpee"]) == 78
    assert "Did you mean tpe?" in capsys.readouterr().err
    assert main([file, "--results"]) == 78
    assert "no sweep has been run there" in capsys.readouterr().err


@pytest.mark.runs
def test_keys_keep_their_kind_and_drawn_values_reach_the_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Whole numbers stay whole; null and whole sections can be drawn."""
    warmup = {"start_rows": 2, "step_rows": 2, "tokens": 400}
    space = make_space(
        spec(
            tiny_run(),
            tmp_path,
            space="{optim.lr: {low: 1e-4, high: 1, log: true}, model.num_layers: {low: 1, high: 7, step: 3}, "
            f"phases.short.batch_warmup: {{choices: [null, {warmup}]}}, "
            "phases.long.objective.mask_rate: {low: 0.1, high: 1}}",
        )
    )
    assert space.distributions == {
        "optim.lr": FloatDistribution(1e-4, 1, log=True),
        "model.num_layers": IntDistribution(1, 7, step=3),
        "phases.short.batch_warmup": CategoricalDistribution(
            [None, '{"start_rows": 2, "step_rows": 2, "tokens": 400}']
        ),
        "phases.long.objective.mask_rate": FloatDistribution(0.1, 1),
    }
    drawn = {"optim.lr": 1.5e-5, "model.num_layers": 4, "phases.long.objective.mask_rate": 0.5}
    config = space.run_config(3, drawn | {"phases.short.batch_warmup": None})
    assert (config.optim.lr, config.model.num_layers, config.in_phase["long"].objective.mask_rate) == (1.5e-5, 4, 0.5)
    assert config.phases["short"].batch_warmup is None and config.folder == f"{tmp_path}/home/sweep/trial-0003"
    label = '{"start_rows": 2, "step_rows": 2, "tokens": 400}'
    found = space.run_config(3, {"phases.short.batch_warmup": label}).phases["short"].batch_warmup
    assert found is not None and (found.start_rows, found.step_rows, found.tokens) == (2, 2, 400)


@pytest.mark.runs
def test_a_grid_tries_every_combination_once(tiny_run: TinyRun, tmp_path: Path) -> None:
    space = make_space(
        spec(
            tiny_run(),
            tmp_path,
            "sampler=grid",
            "trials=null",
            space="{optim.lr: {low: 1e-4, high: 1e-2, log: true, points: 3}, seed: {choices: [1, 2]}}",
        )
    )
    assert space.trials == 6
    assert [(round(point["optim.lr"], 9), point["seed"]) for point in space.points] == [
        (1e-4, 1), (1e-4, 2), (1e-3, 1), (1e-3, 2), (1e-2, 1), (1e-2, 2),
    ]  # fmt: skip
    assert grid_values(DimensionConfig(low=0.1, high=0.5, step=0.2)) == pytest.approx([0.1, 0.3, 0.5])
    assert grid_values(DimensionConfig(low=2, high=4, points=5)) == pytest.approx([2, 2.5, 3, 3.5, 4])


def test_the_figures_of_a_run() -> None:
    """The last held-out figure; for steps the median of the second half, since the first are slow."""
    entries = [
        {"kind": "step", "tokens": 90 * i, "tokens_per_second": speed} for i, speed in enumerate([1, 1, 8, 9, 7])
    ]
    entries += [
        {"kind": "validation", "tokens": 105, "loss": 5.0},
        {"kind": "validation", "tokens": 190, "loss": 4.5},
        {"kind": "validation", "tokens": 230, "loss": 4.0},
        {"kind": "validation", "tokens": 310, "loss": float("nan")},
    ]
    assert figure(entries[:-1], "validation.loss") == 4.0
    assert math.isnan(figure(entries, "validation.loss") or 0) and figure(entries, "step.loss") is None
    assert figure(entries, "step.tokens_per_second") == 8
    found = milestones(entries, "validation.loss", 100)
    assert list(found) == [100, 200, 300] and [found[100], found[200]] == [5.0, 4.0] and found[300] != found[300]


@pytest.mark.runs
@pytest.mark.parametrize("file", READY, ids=lambda file: file.stem)
def test_ready_sweeps_are_sweeps(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every corner of their spaces is a valid run for `check`, except points that the file calls bad."""
    monkeypatch.chdir(file.parents[2])
    from launch.sweep import read_sweep

    space = make_space(read_sweep([str(file)]))
    assert space.sweep.name == file.stem and space.trials >= 3
    for key, distribution in space.distributions.items():
        ends = (
            distribution.choices
            if isinstance(distribution, CategoricalDistribution)
            else (distribution.low, distribution.high)  # type: ignore[attr-defined]
        )
        for end in ends:
            config = space.run_config(0, {key: end})
            check(config)
            assert flat(config) != flat(space.first)


@pytest.mark.runs
def test_a_printed_sweep_is_one_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run is named as yamls/quickstart.yaml, which a user of a wheel lacks; only its data are missing then."""
    monkeypatch.chdir(tmp_path)
    assert command(["init", "sweep", "mask_rate"]) == 0
    (tmp_path / "s.yaml").write_text(capsys.readouterr().out)
    assert command(["sweep", "s.yaml"]) == 65
    assert "data/quickstart/tokenizer/tokenizer.json: not a readable tokenizer" in capsys.readouterr().err


def test_there_are_the_sweeps_that_the_docs_name() -> None:
    assert [file.stem for file in READY] == ["batch_warmup", "lr_by_weight_decay", "mask_rate", "schedule"]
