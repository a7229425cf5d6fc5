"""What a run on GPUs takes of its own accord, by GPUs that are described: this machine has none.

If this breaks, a run trains at half of its speed without a word, or goes on with another cut into microbatches than it
was trained with, and so with other dropout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.manifest import CONFIG_YAML, STATE
from modernbert_train.config import packages
from modernbert_train.config.auto import filled, recorded
from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed import bf16
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import ConfigError, Halved
from modernbert_train.plan import card, tuned
from modernbert_train.plan.card import card_of, card_of_all
from modernbert_train.plan.halved import HALVED, halve, halved, is_full
from modernbert_train.plan.room import Card, configured_memory
from modernbert_train.plan.tuned import SETTINGS, Tuned, fit_of, take
from tests.conftest import TinyRun

GPU = Compute(torch.device("cuda", 0), "amp_bf16")
H100, T4 = Card("H100", 85_000_000_000), Card("T4", 16_000_000_000, 8, False, ("T4 has capability 7.5",))
KEY = "phases.short.microbatch_tokens"


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "device_name", lambda device: "H100")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def config(tiny_run: TinyRun, tmp_path: Path) -> RunConfig:
    """A run that leaves everything open, with 64 rows of 64 tokens in a step, and then 128 of 128."""
    open_phases = (f"phases.{name}.microbatch_tokens=null" for name in ("short", "long"))
    sizes = ("phases.short.batch_rows=64", "phases.short.batch_warmup=null", "phases.long.batch_rows=128")
    return load_run([tiny_run()[0]], [f"runs_folder={tmp_path}/runs", *open_phases, *sizes, "compute.device=auto"])


def gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, *missing: str) -> Card:
    """What `card_of` makes of a GPU, where some of Triton and gcc are missing."""
    properties = SimpleNamespace(name="T4", total_memory=16 << 30, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(packages, "_is_there", lambda name: name not in missing)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None if name in missing else name)  # type: ignore[attr-defined]
    monkeypatch.delenv("CC", raising=False)
    card = card_of(GPU)
    assert card is not None and (card.label, card.memory_bytes) == ("T4", 16 << 30)
    return card


def test_a_gpu_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu((8, 0), monkeypatch).lacks == () and gpu((9, 0), monkeypatch, "gcc").lacks == (), "clang is there"
    assert gpu((7, 5), monkeypatch).lacks == ("T4 has capability 7.5, and 8.0 is needed",)
    lacks = gpu((9, 0), monkeypatch, "triton", "gcc", "clang").lacks
    assert lacks[0].startswith("Triton is not installed") and lacks[1].startswith("there is no C compiler (gcc, clang;")
    assert card_of(Compute(torch.device("cpu"), "fp32")) is None
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name: "/none")  # type: ignore[attr-defined]
    assert [each.partition(" (")[0] for each in gpu((9, 0), monkeypatch).lacks] == [
        "Python's headers are not installed"
    ]


@pytest.mark.parametrize("has", [True, False])
def test_on_a_cpu_it_says_what_bf16_would_win(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who trains on a CPU with bf16 would never learn that it is there."""
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: has)
    line = bf16.cpu_gain_line("auto")
    assert line.startswith("compute.precision=bf16 is faster on this processor") if line is not None else not has
    assert bf16.cpu_gain_line("fp32") is None, "its user wants it so"


def test_a_run_that_begins_takes_what_its_gpus_are_fast_with(config: RunConfig) -> None:
    taken = take(config, GPU, card=H100).config
    assert taken.compute.compile is True and taken.optim.fused is True
    assert [phase.microbatch_tokens for phase in taken.phases.values()] == [64 * 64, 128 * 128]
    taken = take(config, GPU, card=H100, ranks=2).config
    assert [phase.microbatch_tokens for phase in taken.phases.values()] == [32 * 64, 64 * 128], "all rows of a rank"
    assert take(config, Compute(torch.device("cpu"), "fp32")).config == filled(config, {}), "as ever on a CPU"


def test_what_tune_found_comes_before_what_is_usual(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_is_there", lambda name: True)
    fit = fit_of(config, "short", GPU)
    file = Path(config.runs_folder) / "tuned" / fit.case / SETTINGS
    file.parent.mkdir(parents=True)
    file.write_text(Tuned(fit, {"compute.compile": False, "microbatch_tokens": 512}, (1.0, 2.0), "2026-11-24").write())
    taken, text = take(config, GPU, card=H100)
    assert (taken.compute.compile, taken.optim.fused) == (False, True)
    assert [phase.microbatch_tokens for phase in taken.phases.values()] == [512, 128 * 128]
    assert "compute.compile=false, phases.short.microbatch_tokens=512" in text


def checkpoint(config: RunConfig, phase: str, step: int = 7) -> None:
    """Of the run, so far as these rules look: its configuration, and the phase of its last step."""
    folder = Path(config.folder, f"checkpoints/step-{step:08d}")
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps({"phase": phase}))
    for file in (folder / CONFIG_YAML, Path(config.folder, CONFIG_YAML)):
        file.write_text(to_yaml(config))


@pytest.mark.runs
def test_a_run_that_was_trained_keeps_what_it_took_whatever_gpu_it_resumes_on(config: RunConfig) -> None:
    whole = configured_memory(take(config, GPU, card=H100).config, "long", H100, 1).peak
    first = take(config, GPU, card=Card("small", int((0.7 * whole + 1.5e9) / 0.92))).config
    checkpoint(first, "short")
    assert first.phases["long"].tokens_at_once < 128 * 128
    assert take(config, GPU, card=H100).config == first
    old = take(config, GPU, card=T4).config
    assert [phase.microbatch_tokens for phase in old.phases.values()] == [
        phase.microbatch_tokens for phase in first.phases.values()
    ]
    assert old.compute.compile is False and old.optim.fused is False, "which that GPU cannot do, and the start says so"
    assert take(config, Compute(torch.device("cpu"), "fp32")).config.optim.fused is False, "nor can a CPU"
    fresh = take(config, GPU, card=H100, fresh=True).config
    assert fresh.phases["long"].tokens_at_once == 128 * 128


def test_a_run_that_was_trained_before_any_of_this_stays_as_it_was(config: RunConfig) -> None:
    """Eager, foreach, one row: its dropout is keyed by the number of the microbatch."""
    checkpoint(config, "short")
    assert take(config, GPU, card=H100).config == filled(config, {})
    more = replace(config.phases["long"], row_tokens=64)
    added = replace(config, phases={**config.phases, "last": more})
    taken = take(added, GPU, card=H100).config
    assert taken.phases["long"].tokens_at_once == 128 and taken.phases["last"].tokens_at_once == 128 * 64
    other = replace(config, phases={**config.phases, "long": replace(config.phases["long"], row_tokens=256)})
    assert recorded(other, config).phases["long"].tokens_at_once == 256, "128 would be half a row"


def halving(given: RunConfig, taken: RunConfig, phase: str) -> Halved | ConfigError | None:
    return halve(Path(given.folder), phase, given.phases[phase], taken.phases[phase])


class TestHalving:
    def test_half_is_noted_for_every_start_that_follows(self, config: RunConfig) -> None:
        Path(config.folder).mkdir(parents=True)
        taken = take(config, GPU, card=H100).config
        for half in (32, 16):
            error = halving(config, taken, "short")
            assert isinstance(error, Halved) and error.exit_code == 75
            assert str(error) == (
                f"{KEY}={2 * half * 64} does not fit the memory of this GPU: all ranks start again with {half * 64}"
            )
            taken = take(config, GPU, card=H100).config
            assert [phase.microbatch_rows for phase in taken.phases.values()] == [half, 128]
        checkpoint(taken, "short")
        assert take(config, GPU, card=H100).config == taken
        assert take(config, GPU, card=H100, fresh=True).config.phases["short"].microbatch_rows == 64

    def test_what_is_given_stays_and_so_does_what_was_trained(self, config: RunConfig) -> None:
        """Another cut draws other dropout, so what has a checkpoint goes on as it is, or not at all."""
        Path(config.folder).mkdir(parents=True)
        given = replace(
            config, phases={**config.phases, "short": replace(config.phases["short"], microbatch_tokens=512)}
        )
        taken = take(given, GPU, card=H100).config
        assert halving(given, taken, "short") is None and isinstance(halving(given, taken, "long"), Halved)
        taken = take(config, GPU, card=H100).config
        checkpoint(taken, "short", step=0)
        assert isinstance(halving(config, taken, "short"), Halved), "nothing was trained before the first step"
        checkpoint(taken, "short")
        assert halving(config, taken, "short") is None and isinstance(halving(config, taken, "long"), Halved)

    def test_one_row_cannot_be_halved(self, config: RunConfig) -> None:
        Path(config.folder).mkdir(parents=True)
        error = halving(config, filled(config, {}), "short")
        assert isinstance(error, ConfigError) and "not even one row fits" in str(error)
        assert not Path(config.folder, HALVED).exists()

    @pytest.mark.parametrize("text", ["[]", "{", '{"phases.short.microbatch_tokens": 0}', '{"x": 64}'])
    def test_a_damaged_note_is_none(self, config: RunConfig, text: str) -> None:
        Path(config.folder).mkdir(parents=True)
        Path(config.folder, HALVED).write_text(text)
        assert KEY not in halved(Path(config.folder))

    def test_what_says_that_memory_is_full(self) -> None:
        assert is_full(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
        assert is_full(RuntimeError("Triton Error [CUDA]: out of memory"))
        assert is_full(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
        assert not is_full(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.runs
def test_dropout_goes_on_as_it_was_where_a_resumed_run_would_take_another_microbatch(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Started with two rows, resumed where nobody says: the same losses to the bit as of a run that went through."""

    def losses(name: str) -> list[Any]:
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [entry["loss"] for entry in map(json.loads, lines) if entry["kind"] == "step"]

    words = [*tiny_run(f"runs_folder={tmp_path}/runs"), "checkpoint.interval_steps=2", "data.validation=null"]
    words += ["model.attention_out_dropout=0.3", "phases.short.batch_warmup=null", "phases.long=null"]
    took, nobody = f"{KEY}=128", f"{KEY}=null"
    assert main(["train", *words, took, "phases.short.tokens=1000"]) == 0
    assert main(["train", *words, nobody, "phases.short.tokens=2000"]) == 0
    assert main(["train", *words, took, "phases.short.tokens=2000", "name=through"]) == 0
    assert main(["train", *words, nobody, "phases.short.tokens=2000", "name=rows"]) == 0
    assert losses("tiny") == losses("through") != losses("rows")


def test_ranks_that_share_a_gpu_have_a_part_of_its_memory_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(card, "card_of", lambda compute: H100)
    for others, expected in (([("GPU-1", H100)], H100.memory_bytes // 2), ([("GPU-2", H100)], H100.memory_bytes)):
        monkeypatch.setattr(card, "gather_from_all", lambda mine, others=others: [mine, *others])
        found = card_of_all(GPU)
        assert found is not None and found.memory_bytes == expected
