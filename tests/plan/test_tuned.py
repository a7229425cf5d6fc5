"""What a run takes of what `tune` found.

A setting of another device, or one that changes when a run resumes, would train something else than was started.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.config.auto import filled, open_settings, recorded, value_of
from modernbert_train.config.load import load_run
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import ConfigError
from modernbert_train.plan.tuned import SETTINGS, Tuned, fit_of, take
from tests.conftest import TinyRun

CPU = Compute(torch.device("cpu"), "fp32")
FOUND = {"compute.compile": False, "compute.threads": 1, "compute.query_block": 32, "microbatch_tokens": 64}


@pytest.fixture(autouse=True)
def nobody_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def config(tiny_run: TinyRun, tmp_path: Path) -> RunConfig:
    return load_run([tiny_run()[0]], [f"runs_folder={tmp_path}/runs"])


def write(config: RunConfig, settings: dict[str, Any] = FOUND, phase: str = "short", **other: Any) -> Path:
    """Leave a finding for a phase of a run, perhaps one of another device or torch."""
    fit = replace(fit_of(config, phase, CPU), **other)
    file = Path(config.runs_folder) / "tuned" / fit.case / SETTINGS
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(Tuned(fit, settings, (1000.0, 1300.0), "2026-11-23").write())
    return file


def test_without_a_finding_a_run_is_what_it_was(config: RunConfig) -> None:
    """And its first lines say what `tune` may win."""
    taken, text = take(config, CPU)
    assert taken.compute.compile is False and taken.compute.attention == "auto" and taken.compute.threads is None
    assert text == "not tuned. `tune` measures here what a compiler, threads may win"
    assert open_settings(taken).keys() <= {"compute.attention", "compute.global_attention", "compute.threads",
                                           "compute.query_block", "compute.logit_chunk"}  # fmt: skip


def test_a_finding_that_fits_is_taken_and_what_is_given_stays(config: RunConfig) -> None:
    file = write(config)
    taken, text = take(config, CPU)
    assert (taken.compute.threads, taken.compute.query_block) == (1, 32)
    assert taken.phases["short"].microbatch_tokens == 256, "the run gives it"
    assert text == (
        f"by {file}: compute.query_block=32, compute.threads=1; 1.30 x the tokens/s of the plain settings when it was "
        "found, 2026-11-23"
    )
    given = replace(config, compute=replace(config.compute, threads=3))
    assert take(given, CPU)[0].compute.threads == 3


def test_a_microbatch_that_is_left_open_is_that_of_the_row_length(config: RunConfig) -> None:
    phases = {name: replace(phase, microbatch_tokens=None) for name, phase in config.phases.items()}
    config = replace(config, phases=phases)
    assert [phase.tokens_at_once for phase in phases.values()] == [64, 128], "one row where nobody says anything"
    write(config, FOUND | {"microbatch_tokens": 256})
    write(config, {"microbatch_tokens": 512}, phase="long")
    assert [phase.microbatch_tokens for phase in take(config, CPU)[0].phases.values()] == [256, 512]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"torch": "1.0"}, "torch 1.0, here "),
        ({"model": {"name": "modernbert", "hidden_size": "9"}}, "a model of another shape"),
        ({"precision": "amp_bf16"}, "precision amp_bf16, here fp32"),
    ],
)
def test_a_finding_of_something_else_is_ignored_and_the_reason_said(
    config: RunConfig, other: dict[str, Any], said: str
) -> None:
    write(config, **other)
    taken, text = take(config, CPU)
    assert taken == filled(config, {})
    assert text.startswith("what was found is for ") and said in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 2'),
    ],
)
def test_a_damaged_finding_is_ignored_and_named(config: RunConfig, damage: Any) -> None:
    file = write(config)
    file.write_text(damage(file.read_text()))
    taken, text = take(config, CPU)
    assert taken == filled(config, {})
    assert text.startswith(f"{file} is damaged (") and "tune again" in text


def test_a_finding_that_cannot_serve_any_more_is_ignored(config: RunConfig) -> None:
    """FlashAttention was there when it was found; the run must not end at a key that nobody has set."""
    config = replace(config, compute=replace(config.compute, device="auto"))
    write(config, {"compute.attention": "varlen"})
    taken, text = take(config, CPU)
    assert taken.compute.attention == "auto" and "is ignored: varlen: " in text


def test_threads_that_the_environment_names_stay(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of several ranks shares the cores out by it."""
    write(config)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert take(config, CPU)[0].compute.threads is None


def test_findings_may_be_elsewhere_or_not_wanted(config: RunConfig, tmp_path: Path) -> None:
    write(config)
    nothing = replace(config, compute=replace(config.compute, tuned="none"))
    assert take(nothing, CPU) == (filled(nothing, {}), "")
    there = replace(config, runs_folder=str(tmp_path / "elsewhere"),
                    compute=replace(config.compute, tuned=str(tmp_path / "runs/tuned")))  # fmt: skip
    assert take(there, CPU)[0].compute.threads == 1
    gone = replace(config, compute=replace(config.compute, tuned=str(tmp_path / "gone")))
    with pytest.raises(ConfigError, match=r"compute\.tuned=.*gone: no such folder"):
        take(gone, CPU)


def test_a_run_that_was_trained_keeps_what_it_was_trained_with(config: RunConfig) -> None:
    then = filled(config, {"compute.compile": True, "compute.threads": 2})
    now = recorded(config, then)
    assert value_of(now, "compute.compile") is True and value_of(now, "compute.threads") == 2
    assert recorded(config, config) == filled(config, {}), "written before there was anything to be tuned"
    given = replace(config, compute=replace(config.compute, compile=False))
    assert recorded(given, then).compute.compile is False


@pytest.mark.runs
def test_a_run_resumes_as_it_was_started(tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuned while it was stopped, or the finding is gone: the same settings, and the same losses to the bit."""
    words = [*tiny_run(f"runs_folder={tmp_path}/runs"), "checkpoint.interval_steps=2"]
    short = [*words, "phases.short.tokens=1200", "phases.short.batch_warmup=null", "phases.long.tokens=128",
             "phases.long.schedule.decay_tokens=0"]  # fmt: skip
    config = load_run([words[0]], short[1:])

    def losses(name: str) -> list[float]:
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [entry["loss"] for entry in map(json.loads, lines) if entry["kind"] == "step"]

    file = write(config)
    assert main(["train", *short]) == 0
    assert re.search(
        rf"  tuned   by {file}: compute.query_block=32, compute.threads=1; 1\.30 x", capsys.readouterr().out
    )
    saved = load_run([tmp_path / "runs/tiny/config.yaml"])
    assert (saved.compute.query_block, saved.compute.threads, saved.compute.compile) == (32, 1, False)

    write(config, FOUND | {"compute.query_block": 16})
    assert main(["train", *short, "phases.long.tokens=640"]) == 0
    out = capsys.readouterr().out
    assert "as this run was trained so far: compute.query_block=32, compute.threads=1" in out
    changed = out.partition("changed since the last start:")[2].splitlines()[1:3]
    assert changed[0].split() == ["phases.long.tokens:", "128", "->", "640"] and not changed[1].startswith(" ")
    assert load_run([tmp_path / "runs/tiny/config.yaml"]).compute.query_block == 32

    file.unlink()
    settings = ["compute.query_block=32", "compute.threads=1"]
    assert main(["train", *short, "phases.long.tokens=640", *settings, "name=whole"]) == 0
    assert losses("whole") == losses("tiny")
