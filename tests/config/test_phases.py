"""A phase overrides the run with the run's own keys. If this breaks, a phase trains with values that the user did not
write, or a file of an earlier version is read incompletely."""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.clock import Clock
from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.config.renamed import REMOVED_KEYS, RENAMED
from modernbert_train.errors import ConfigError
from tests.support.configurations import Load, Refused

OWN = "phases: {decay: {model: {global_rope_theta: 160_000}, objective: {mask_rate: 0.1}, optim: {weight_decay: 0}}}"


def test_the_run_is_in_each_phase_what_the_phase_says(load: Load) -> None:
    config = load(OWN, "model.local_rope_theta=5_000")
    first, last = config.in_phase["stable"], config.in_phase["decay"]
    assert (first.model, first.objective, first.optim) == (config.model, config.objective, config.optim)
    assert (last.modernbert.global_rope_theta, last.modernbert.local_rope_theta) == (160_000.0, 5_000.0)
    assert (last.objective.mask_rate, last.optim.weight_decay) == (0.1, 0.0)
    assert last.modernbert.num_layers == config.modernbert.num_layers and last.optim.lr == config.optim.lr
    assert last.in_phase["decay"] == last, "a second lookup gives the same"


def test_the_clock_says_which_phase_is_now(load: Load) -> None:
    """Before the first token of a phase the previous one applies; past the end the last."""
    config = load(OWN)
    found = [
        config.in_phase[Clock.of(config).at(tokens).name].modernbert.global_rope_theta
        for tokens in (0, 999_999, 1_000_000, 9_999_999)
    ]
    assert found == [10_000.0, 10_000.0, 160_000.0, 160_000.0]


def test_a_phase_takes_values_as_the_run_does(load: Load) -> None:
    """Later files win, null reverts a change, references are resolved, whole numbers take the key's type."""
    config = load(OWN, "phases.decay.model.global_rope_theta=null", "phases.stable.optim.weight_decay=${optim.eps}")
    assert config.in_phase["decay"].model == config.model and config.in_phase["decay"].objective.mask_rate == 0.1
    assert config.in_phase["stable"].optim.weight_decay == 1e-6
    rate = config.in_phase["decay"].optim.weight_decay
    assert rate == 0.0 and isinstance(rate, float)
    assert load("phases: {decay: {model: null}}").phases["decay"].model == {}
    assert load(OWN, "optim.name=adamw").in_phase["decay"].optim.name == "adamw"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "phases: {decay: {model: {num_layers: 4}}}",
            "phases.decay.model.num_layers (extra.yaml:1): the same in all phases. A phase may change "
            "model.rope_scaling, model.rope_factor, ",
        ),
        (
            "phases: {decay: {optim: {lr: 1.0e-4}}}",
            "phases.decay.optim.lr (extra.yaml:1): the same in all phases. A phase may change optim.weight_decay. Set "
            "phases.decay.lr_ratio for its peak rate.",
        ),
        (
            "phases: {decay: {compute: {compile: true}}}",
            "phases.decay.compute (extra.yaml:1): the same in all phases. A phase may change nothing of compute.",
        ),
        (
            "phases: {decay: {objective: {mask_rat: 0.1}}}",
            "phases.decay.objective.mask_rat (extra.yaml:1): unknown key. Did you mean "
            "phases.decay.objective.mask_rate?",
        ),
        (
            "phases: {decay: {objective: {mask_rate: '${name}'}}}",
            "an interpolation cannot be resolved: phases.decay.objective.mask_rate='base': expected a number",
        ),
    ],
)
def test_what_a_phase_cannot_have_is_reported(refused: Refused, text: str, message: str) -> None:
    (line,) = refused(text)
    assert line.startswith(message)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_is_answered_with_the_new_one(refused: Refused, old: str, new: str) -> None:
    """And the new one exists."""
    old, new = old.replace("*", "decay"), new.replace("*", "decay")
    assert refused("", f"{old}=1") == [f"{old} (command line): is now {new}. Rename it."]
    assert "unknown key" not in refused("", f"{new}={{x: 1}}")[0]


@pytest.mark.parametrize(("key", "answer"), REMOVED_KEYS.items())
def test_a_key_that_was_removed_is_answered_with_what_replaces_it(
    load: Load, refused: Refused, tmp_path: Path, key: str, answer: str
) -> None:
    """A saved run still loads: it was written by a version that had the key."""
    assert refused("", f"{key}=1") == [f"{key} (command line): {answer}"]
    section, name = key.split(".")
    (line,) = refused(f"{section}: {{{name}: none}}")
    assert line == f"{key} (extra.yaml:1): {answer}"
    config = load()
    saved = tmp_path / "run/config.yaml"
    saved.parent.mkdir()
    saved.write_text(to_yaml(config).replace(f"{section}:\n", f"{section}:\n  {name}: none\n"))
    with pytest.raises(ConfigError, match="was removed"):
        load_run([saved])
    (saved.parent / "metrics.jsonl").touch()
    assert load_run([saved]) == config
