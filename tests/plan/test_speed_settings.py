"""Speed settings that a run leaves open, on a CPU and on simulated GPUs.

If this breaks, a run silently trains at half of its speed, or resumes with other microbatches than before, and so with
other dropout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from modernbert_train.__main__ import main
from modernbert_train.checkpoints.manifest import CONFIG_YAML, STATE
from modernbert_train.config import packages
from modernbert_train.config.auto import filled, recorded
from modernbert_train.config.load import load_run, to_yaml
from modernbert_train.config.schema import RunConfig
from modernbert_train.distributed import bf16, group
from modernbert_train.distributed.compute import Compute
from modernbert_train.errors import ConfigError, OomBackoff
from modernbert_train.plan import speed_settings
from modernbert_train.plan.memory_fit import configured_memory
from modernbert_train.plan.oom_backoff import BACKOFF_FILE, halve, is_full, read_backoff
from modernbert_train.plan.speed_settings import (
    RunGpus,
    close_settings,
    gpu_of_this_rank,
    gpus_of_run,
)
from tests.support.jobs import losses
from tests.support.small_checkpoint import sign
from tests.support.tiny_run import TinyRun
from tests.support.verbs import Says

ON_GPU = Compute(torch.device("cuda", 0), "amp_bf16")
H100, T4 = RunGpus("H100", 85_000_000_000), RunGpus("T4", 16_000_000_000, 8, False, ("T4 has capability 7.5",))
KEY = "phases.short.microbatch_tokens"


@pytest.fixture(autouse=True)
def nobody_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def config(tiny_run: TinyRun, tmp_path: Path) -> RunConfig:
    """Return a run with all of them open, of 64 rows of 64 tokens in a step, and then 128 of 128."""
    open_phases = (f"phases.{name}.microbatch_tokens=null" for name in ("short", "long"))
    sizes = ("phases.short.batch_rows=64", "phases.short.batch_warmup=null", "phases.long.batch_rows=128")
    return load_run([tiny_run()[0]], [f"runs_folder={tmp_path}/runs", *open_phases, *sizes, "compute.device=auto"])


def with_phase(config: RunConfig, name: str, like: str, **keys: int) -> RunConfig:
    return replace(config, phases={**config.phases, name: replace(config.phases[like], **keys)})


def gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, *missing: str) -> RunGpus:
    """Return `gpu_of_this_rank` for a GPU, with some of Triton and gcc missing."""
    properties = SimpleNamespace(name="T4", total_memory=16 << 30, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(packages, "_is_there", lambda name: name not in missing)
    monkeypatch.setattr(packages.shutil, "which", lambda name: None if name in missing else name)  # type: ignore[attr-defined]
    monkeypatch.delenv("CC", raising=False)
    found = gpu_of_this_rank(ON_GPU)
    assert found is not None and (found.label, found.memory_bytes) == ("T4", 16 << 30)
    return found


def test_a_gpu_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu((8, 0), monkeypatch).lacks == () and gpu((9, 0), monkeypatch, "gcc").lacks == (), "clang suffices"
    assert gpu((7, 5), monkeypatch).lacks == ("T4 has capability 7.5, and 8.0 is needed",)
    lacks = gpu((9, 0), monkeypatch, "triton", "gcc", "clang").lacks
    assert lacks[0].startswith("Triton is not installed") and lacks[1].startswith("there is no C compiler (gcc, clang;")
    assert gpu_of_this_rank(Compute(torch.device("cpu"), "fp32")) is None
    monkeypatch.setattr(packages.sysconfig, "get_path", lambda name: "/none")  # type: ignore[attr-defined]
    assert [each.partition(" (")[0] for each in gpu((9, 0), monkeypatch).lacks] == [
        "Python's headers are not installed"
    ]


@pytest.mark.parametrize("has", [True, False])
def test_on_a_cpu_it_says_what_bf16_would_win(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a user who trains on a CPU with bf16 support would never learn of it."""
    monkeypatch.setattr(bf16, "cpu_has_bf16", lambda: has)
    line = bf16.cpu_gain_line("auto")
    assert line.startswith("compute.precision=bf16 is faster on this processor") if line is not None else not has
    assert bf16.cpu_gain_line("fp32") is None, "the user chose it"


def test_a_run_that_begins_takes_what_its_gpus_are_fast_with(config: RunConfig) -> None:
    taken = close_settings(config, gpus=H100).config
    assert taken.compute.compile is True and taken.optim.fused is True
    assert [phase.microbatch_tokens for phase in taken.phases.values()] == [64 * 64, 128 * 128]
    taken = close_settings(config, gpus=H100, ranks=2).config
    assert [phase.microbatch_tokens for phase in taken.phases.values()] == [32 * 64, 64 * 128], "all rows of a rank"
    assert close_settings(config).config == filled(config, {}), "the usual settings of a CPU"


def test_the_banner_says_what_was_chosen_and_why(config: RunConfig) -> None:
    data = replace(config.data, num_workers=None)
    config = replace(config, data=data)
    on_cpu = "compute.compile=false, optim.fused=false, data.num_workers=1, phases.short.microbatch_tokens=64, "
    assert close_settings(config).lines == [f"{on_cpu}phases.long.microbatch_tokens=128: as usual on a CPU"]
    first, *others = close_settings(config, gpus=H100).lines
    assert first.startswith("compute.compile=true, optim.fused=true, data.num_workers=1, phases.short.micro")
    assert first.endswith(": as usual on H100") and others[0].startswith("microbatches that were left open take ")
    lacking = close_settings(config, gpus=T4).lines
    assert lacking[0].startswith("compute.compile=false, optim.fused=false, ")
    assert lacking[1].startswith("compute.compile and optim.fused are off: T4 has capability 7.5. Without both")
    checkpoint(close_settings(config).config, "short")
    (said,) = close_settings(config).lines
    assert said == f"{on_cpu}phases.long.microbatch_tokens=128: as this run was trained so far"


def test_what_is_given_stays_on_every_device(config: RunConfig) -> None:
    given = replace(config, compute=replace(config.compute, compile=False, threads=3))
    for gpus in (None, H100):
        closed = close_settings(given, gpus=gpus).config
        assert closed.compute.compile is False and closed.compute.threads == 3
    assert close_settings(given, gpus=H100).config.optim.fused is True


def test_threads_that_the_environment_names_come_before_those_of_the_last_start(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher of several ranks divides the cores by it."""
    checkpoint(filled(config, {"compute.threads": 1, "compute.compile": True}), "short")
    closed = close_settings(config).config.compute
    assert (closed.threads, closed.compile) == (1, True)
    given = replace(config, compute=replace(config.compute, compile=False))
    assert close_settings(given).config.compute.compile is False
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert close_settings(config).config.compute.threads is None


class TestTune:
    """The verb was removed and its results are not read: a user who has some must be informed, and lose no run."""

    def old(self, config: RunConfig, case: str = "epyc-2-cores-modernbert-64-0f3a77b1") -> Path:
        file = Path(config.runs_folder) / "tuned" / case / "settings.json"
        file.parent.mkdir(parents=True)
        file.write_text('{"format": 1, "settings": {"compute.query_block": 32, "microbatch_tokens": 256}}')
        return file

    def test_a_result_that_a_run_would_have_used_is_named_by_check_and_when_it_begins(
        self, tiny_run: TinyRun, config: RunConfig, says: Says
    ) -> None:
        file = self.old(config)
        assert f"warning: {file}: no longer read." in says("check", *tiny_run())
        closed, lines = close_settings(config)
        assert closed == filled(config, {})
        assert lines[1:] == [
            f"{file}: no longer read. Write its settings as keys of the run, microbatch_tokens as a key of the phase, "
            "or remove the file"
        ]
        checkpoint(closed, "short")
        assert not any("no longer read" in line for line in close_settings(config).lines), "once only"

    def test_a_result_of_another_model_or_row_length_is_not(self, config: RunConfig) -> None:
        for case in ("epyc-modernbert-640-0f3a77b1", "epyc-bert-64-0f3a77b1"):
            self.old(config, case)
        assert len(close_settings(config).lines) == 1

    @pytest.mark.runs
    def test_a_run_that_was_trained_with_one_resumes_with_its_settings(
        self, tiny_run: TinyRun, tmp_path: Path, says: Says
    ) -> None:
        """Its folder and checkpoints contain the removed key; the losses are equal to the bit."""
        words = [*tiny_run(f"runs_folder={tmp_path}/runs"), "checkpoint.interval_steps=2", "phases.long=null"]
        words += ["phases.short.batch_warmup=null", "data.validation=null"]
        found = ["compute.query_block=32", "compute.threads=1"]
        assert main(["train", *words, *found, "phases.short.tokens=1000"]) == 0
        folder = tmp_path / "runs/tiny"
        for saved in folder.rglob(CONFIG_YAML):
            text = saved.read_text()
            assert text.count("compute:\n") == 1
            saved.write_text(text.replace("compute:\n", f"compute:\n  tuned: {tmp_path}/runs/tuned\n"))
            if saved.parent != folder:
                sign(saved.parent)
        said = says("train", *words, "phases.short.tokens=2000")
        assert "  speed   compute.query_block=32, compute.compile=false, compute.threads=1, optim.fused=false" in said
        assert ": as this run was trained so far\n" in said
        assert main(["train", *words, *found, "phases.short.tokens=2000", "name=through"]) == 0
        assert losses(tmp_path / "runs/tiny") == losses(tmp_path / "runs/through")


def checkpoint(config: RunConfig, phase: str, step: int = 7) -> None:
    """Write the part of a checkpoint that these rules read: its configuration, and the phase of its last step."""
    folder = Path(config.folder, f"checkpoints/step-{step:08d}")
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps({"phase": phase}))
    for file in (folder / CONFIG_YAML, Path(config.folder, CONFIG_YAML)):
        file.write_text(to_yaml(config))


@pytest.mark.runs
def test_a_run_that_was_trained_keeps_what_it_took_whatever_gpu_it_resumes_on(config: RunConfig) -> None:
    whole = configured_memory(close_settings(config, gpus=H100).config, "long", H100, 1).peak
    first = close_settings(config, gpus=RunGpus("small", int((0.7 * whole + 1.5e9) / 0.92))).config
    checkpoint(first, "short")
    assert first.phases["long"].tokens_at_once < 128 * 128
    assert close_settings(config, gpus=H100).config == first
    old = close_settings(config, gpus=T4).config
    assert [phase.microbatch_tokens for phase in old.phases.values()] == [
        phase.microbatch_tokens for phase in first.phases.values()
    ]
    assert old.compute.compile is False and old.optim.fused is False, "unsupported by that GPU; the start says so"
    assert close_settings(config).config.optim.fused is False, "unsupported by a CPU"
    fresh = close_settings(config, gpus=H100, fresh=True).config
    assert fresh.phases["long"].tokens_at_once == 128 * 128


def test_a_run_that_was_trained_before_any_of_this_stays_as_it_was(config: RunConfig) -> None:
    """Eager, foreach, one row: its dropout is keyed by the index of the microbatch."""
    checkpoint(config, "short")
    assert close_settings(config, gpus=H100).config == filled(config, {})
    added = with_phase(config, "last", "long", row_tokens=64)
    taken = close_settings(added, gpus=H100).config
    assert taken.phases["long"].tokens_at_once == 128 and taken.phases["last"].tokens_at_once == 128 * 64
    other = with_phase(config, "long", "long", row_tokens=256)
    assert recorded(other, config).phases["long"].tokens_at_once == 256, "128 would be half a row"


def halving(given: RunConfig, taken: RunConfig, phase: str) -> OomBackoff | ConfigError | None:
    return halve(Path(given.folder), phase, given.phases[phase], taken.phases[phase])


class TestHalving:
    def test_half_is_noted_for_every_start_that_follows(self, config: RunConfig) -> None:
        Path(config.folder).mkdir(parents=True)
        taken = close_settings(config, gpus=H100).config
        for half in (32, 16):
            error = halving(config, taken, "short")
            assert isinstance(error, OomBackoff) and error.exit_code == 75
            assert str(error) == (
                f"{KEY}={2 * half * 64} does not fit the memory of this GPU: all ranks start again with {half * 64}"
            )
            taken = close_settings(config, gpus=H100).config
            assert [phase.microbatch_rows for phase in taken.phases.values()] == [half, 128]
        checkpoint(taken, "short")
        assert close_settings(config, gpus=H100).config == taken
        assert close_settings(config, gpus=H100, fresh=True).config.phases["short"].microbatch_rows == 64

    def test_what_is_given_stays_and_so_does_what_was_trained(self, config: RunConfig) -> None:
        """Other microbatches draw other dropout, so a run with a checkpoint keeps them, or is refused."""
        Path(config.folder).mkdir(parents=True)
        given = with_phase(config, "short", "short", microbatch_tokens=512)
        taken = close_settings(given, gpus=H100).config
        assert halving(given, taken, "short") is None and isinstance(halving(given, taken, "long"), OomBackoff)
        taken = close_settings(config, gpus=H100).config
        checkpoint(taken, "short", step=0)
        assert isinstance(halving(config, taken, "short"), OomBackoff), "before the first step nothing was trained"
        checkpoint(taken, "short")
        assert halving(config, taken, "short") is None and isinstance(halving(config, taken, "long"), OomBackoff)

    def test_one_row_cannot_be_halved(self, config: RunConfig) -> None:
        Path(config.folder).mkdir(parents=True)
        error = halving(config, filled(config, {}), "short")
        assert isinstance(error, ConfigError) and "not even one row fits" in str(error)
        assert not Path(config.folder, BACKOFF_FILE).exists()

    @pytest.mark.parametrize("text", ["[]", "{", '{"phases.short.microbatch_tokens": 0}', '{"x": 64}'])
    def test_a_damaged_note_is_none(self, config: RunConfig, text: str) -> None:
        Path(config.folder).mkdir(parents=True)
        Path(config.folder, BACKOFF_FILE).write_text(text)
        assert KEY not in read_backoff(Path(config.folder))

    def test_what_says_that_memory_is_full(self) -> None:
        assert is_full(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
        assert is_full(RuntimeError("Triton Error [CUDA]: out of memory"))
        assert is_full(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
        assert not is_full(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.runs
def test_dropout_stays_as_it_was_where_a_resumed_run_would_take_another_microbatch(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Started with two rows, resumed with open microbatches: the same losses to the bit as without interruption."""

    words = [*tiny_run(f"runs_folder={tmp_path}/runs"), "checkpoint.interval_steps=2", "data.validation=null"]
    words += ["model.attention_out_dropout=0.3", "phases.short.batch_warmup=null", "phases.long=null"]
    took, nobody = f"{KEY}=128", f"{KEY}=null"
    assert main(["train", *words, took, "phases.short.tokens=1000"]) == 0
    assert main(["train", *words, nobody, "phases.short.tokens=2000"]) == 0
    assert main(["train", *words, took, "phases.short.tokens=2000", "name=through"]) == 0
    assert main(["train", *words, nobody, "phases.short.tokens=2000", "name=rows"]) == 0
    assert losses(tmp_path / "runs/tiny") == losses(tmp_path / "runs/through") != losses(tmp_path / "runs/rows")


def test_ranks_that_share_a_gpu_have_a_part_of_its_memory_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(speed_settings, "gpu_of_this_rank", lambda compute: H100)
    for others, expected in (([("GPU-1", H100)], H100.memory_bytes // 2), ([("GPU-2", H100)], H100.memory_bytes)):
        monkeypatch.setattr(group, "gather_from_all", lambda mine, others=others: [mine, *others])
        found = gpus_of_run(ON_GPU)
        assert found is not None and found.memory_bytes == expected
