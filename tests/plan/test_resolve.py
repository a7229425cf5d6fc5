"""`check` and `train` find the same mistakes: `train` does not refuse seconds later what `check` accepted.

If this breaks, a job waits in a queue for days, loads torch on sixty-four GPUs, and ends with an error that the login
node could have found.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from modernbert_train.config.load import load_run
from modernbert_train.data import shard_sizes
from modernbert_train.errors import ConfigError
from modernbert_train.plan import resolve
from modernbert_train.plan.gpus import RunGpus
from modernbert_train.plan.memory import checkpoint_bytes
from tests.support.probed import call_probed
from tests.support.tiny_run import TINY_YAML, TinyRun
from tests.support.verbs import Says

Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.yaml").write_text(TINY_YAML.format(runs=folder / "runs", data=tiny_data), encoding="utf-8")
    assert main(["train", str(folder / "tiny.yaml")]) == 0
    return folder / "runs/tiny"


@pytest.fixture
def again(trained: Path, tiny_run: TinyRun, tmp_path: Path) -> TinyRun:
    """Return the command line of that run, whose folder may be changed."""
    shutil.copytree(trained, tmp_path / "runs/tiny")
    return tiny_run


@pytest.fixture
def refusal(says: Says) -> Refusal:
    """Return a function that returns `check`'s error, which must equal `train`'s error before it loads torch."""

    def call(words: list[str], code: int = 78) -> str:
        by_check = says("check", *words, code=code)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "modernbert_train.train.session", None)  # importing it would be an error
            assert says("train", *words, code=code) == by_check
        return by_check

    return call


@pytest.mark.runs
def test_a_folder_of_another_configuration(again: TinyRun, refusal: Refusal) -> None:
    said = refusal(again("optim.lr=1e-2", "seed=6"))
    assert "holds a run with another configuration:\n  seed: 5 -> 6\n  optim.lr: 0.005 -> 0.01\n" in said
    assert main(["check", *again("data.num_workers=1")]) == 0


@pytest.mark.runs
def test_what_check_says_of_the_plan_is_what_training_would(
    again: TinyRun, says: Says, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give the same answer: `check` by names and JSON, `train` by verified checkpoints."""
    words = again("phases.short.tokens=5000")
    by_check = refusal(words)
    assert "trained to 6," in by_check and "\n  phases.short.tokens: 4000 -> 5000\n" in by_check
    monkeypatch.setattr("modernbert_train.plan.resolve._folder_looks", lambda *args, **kwargs: iter(()))
    assert says("train", *words, code=78) == by_check


@pytest.mark.runs
def test_a_damaged_checkpoint_is_left_to_training(again: TinyRun, tmp_path: Path) -> None:
    """It resumes from an older one, so the damaged one must not be judged."""
    newest = max((tmp_path / "runs/tiny/checkpoints").iterdir())
    for damage in ("{}", "[1]", "nonsense", '{"tokens": "many", "phase": "long"}'):
        (newest / "state.json").write_text(damage)
        assert main(["check", *again("phases.long.tokens=2500")]) == 0, damage


@pytest.mark.runs
def test_an_average_is_not_trained_on(again: TinyRun, tmp_path: Path, refusal: Refusal) -> None:
    newest = max((tmp_path / "runs/tiny/checkpoints").iterdir())
    assert main(["average", str(newest), str(newest), "--out", str(tmp_path / "runs/averaged")]) == 0
    said = refusal(again("name=averaged"))
    assert said == (
        f"error: {tmp_path}/runs/averaged: an average of checkpoints, which has no moments and no position in the data "
        f"to continue from. Start another run with weights.init_from={tmp_path}/runs/averaged.\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loggers.slack={}"], "loggers.slack: the package slack_sdk is not installed."),
        (["loggers.wandb={}"], "Install it with pip (pip install wandb), or"),
        (["callbacks.system_metrics_monitor={}"], "callbacks.system_metrics_monitor: the package psutil is not inst"),
        (["compute.device=auto", "compute.attention=flash"], "compute.attention=flash: no FlashAttention is installed"),
        (["loggers.tensorbord={}"], "loggers.tensorbord (command line): unknown"),
    ],
)
def test_what_is_not_installed(
    tiny_run: TinyRun,
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    real = importlib.util.find_spec
    absent = ("slack_sdk", "wandb", "psutil", "flash_attn", "flash_attn_interface")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else real(name, *rest))
    assert message in refusal(tiny_run(*words))


COMPILE = "compute.compile=true"
TRITON = ("optim.fused=true", "compute.attention=flex", "compute.global_attention=flex")


@pytest.mark.parametrize(
    ("key", "there", "gpus", "lack"),
    [
        # a C++ compiler on a CPU, which a C compiler does not replace
        (f"compute.device=cpu {COMPILE}", "", "", "there is no compiler here (g++)."),
        (f"compute.device=cpu {COMPILE}", "gcc", "", "there is no compiler here (g++)."),
        (f"compute.device=cpu {COMPILE}", "g++ CXX=absent", "", "there is no compiler here (absent)."),
        (f"compute.device=auto {COMPILE}", "", "", "there is no compiler here (g++, gcc, clang)."),
        (f"compute.device=auto {COMPILE}", "gcc", "", None),
        (f"compute.device=auto {COMPILE}", "g++", "", None),  # a login node
        # what Triton needs, on a machine that shows GPUs, and where a setting names it
        *(
            (f"compute.device=auto {key}", there, gpus, lack)
            for key, gpus in ((COMPILE, "0"), *((key, "") for key in TRITON))
            for there, lack in (
                ("gcc Python.h", "Triton is not installed"),
                ("triton g++ Python.h", "there is no C compiler (gcc, clang;"),
                ("triton gcc Python.h CC=absent", "there is no C compiler (absent;"),
                ("triton gcc", "Python's headers are not installed"),
            )
        ),
    ],
)
def test_what_a_kernel_needs_is_missed_before_the_first_batch(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, key: str, there: str,
    gpus: str, lack: str | None,
) -> None:  # fmt: skip
    """The first batch would end in two hundred lines from torch or Triton, and look like a bug of ours."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    for name in there.split():
        if "=" in name:
            monkeypatch.setenv(*name.split("="))
        else:
            (tmp_path / "bin" / name).touch(0o755)
    real = importlib.util.find_spec
    triton = object() if "triton" in there else None
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: triton if name == "triton" else real(name, *rest)
    )
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "bin"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    if lack is None:
        assert main(["check", *tiny_run(*key.split())]) == 0
        return
    (said,) = refusal(tiny_run(*key.split())).splitlines()
    setting = key.split()[1]
    instead = setting.replace("true", "false").replace("flex", "auto")
    assert said.startswith(f"error: {setting}: {lack}") and said.endswith(f", or set {instead}.")


@pytest.mark.parametrize(
    ("key", "name", "message", "code"),
    [
        ("weights.init_from", "absent", "absent: no such folder, and not the owner/model of a hub.", 65),
        ("weights.grow_from", "{runs}/absent", "{runs}/absent: no such run.", 78),
        ("start.checkpoint", "{runs}/absent", "{runs}/absent: no such run.", 78),
        ("weights.init_from", "ep0-ba4000-rank0.pt", "ep0-ba4000-rank0.pt: no such file.", 65),
        ("weights.init_from", "{runs}", "config.json: cannot be read", 65),
        ("weights.init_from", "{runs}/empty", "{runs}/empty: a run without a checkpoint. Train it first", 74),
    ],
)
def test_first_weights_that_are_not_there(
    tiny_run: TinyRun, tmp_path: Path, refusal: Refusal, key: str, name: str, message: str, code: int
) -> None:
    runs = tmp_path / "runs"
    (runs / "empty").mkdir(parents=True)
    (runs / "empty/config.yaml").write_text("name: empty\n")
    said = refusal(tiny_run(f"{key}={name.format(runs=runs)}"), code)
    assert message.format(runs=runs) in said


def test_a_folder_that_cannot_be_written(tiny_run: TinyRun, tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").write_text("where the folder of runs should be")
    said = refusal(tiny_run(f"runs_folder={tmp_path}/file"), 74)
    assert said.startswith(f"error: {tmp_path}/file/tiny: cannot be written (Not a directory).")
    assert not (tmp_path / "runs").exists()


@pytest.mark.runs
def test_all_mistakes_are_reported_together(again: TinyRun, tmp_path: Path, refusal: Refusal) -> None:
    """One error a day costs a week; the exit code is for the mistake to be fixed first."""
    words = again(
        "model.num_heads=3", f"data.train={tmp_path}/no", f"data.validation={tmp_path}/no2", "loggers.slack={}"
    )
    said = refusal(words).splitlines()
    assert [line.split(":")[0] for line in said] == [
        "error", f"data.train={tmp_path}/no", f"data.validation={tmp_path}/no2", "loggers.slack"
    ]  # fmt: skip
    said = "\n".join(refusal(again("seed=6", "phases.short.tokens=5000")).splitlines())
    assert "seed: 5 -> 6" in said and "phases.short.tokens: 4000 -> 5000" in said


def test_models_that_are_not_there_are_reported_with_the_rest(
    tiny_run: TinyRun, tmp_path: Path, refusal: Refusal
) -> None:
    words = ["objective.name=distill", "weights.init_from=absent", f"data.train={tmp_path}/no"]
    said = refusal(tiny_run(*words, "objective.teacher=a/b/c", "seed=-1")).splitlines()
    assert [line.split(":")[0] for line in said] == [
        "error", f"data.train={tmp_path}/no", "weights.init_from=absent", "objective.teacher=a/b/c"
    ]  # fmt: skip
    said = refusal(tiny_run(*words, "optim.lr=-1")).splitlines()
    assert not any(line.startswith("objective.teacher=") for line in said), "no teacher is named yet"
    assert any(line.startswith("weights.init_from=absent:") for line in said)


@pytest.mark.runs
def test_looking_writes_nothing_and_takes_no_lock(again: TinyRun, tmp_path: Path, tiny_run: TinyRun) -> None:
    """A run in progress must not notice a `check`."""
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    assert main(["check", *again()]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before
    assert main(["check", *tiny_run("name=other")]) == 0
    assert not (tmp_path / "runs/other").exists()


@pytest.mark.runs
def test_none_of_it_loads_torch(again: TinyRun) -> None:
    done = call_probed("train", *again("seed=6", "loggers.slack={}", "compute.attention=sdpa"))
    assert done.returncode == 78 and done.stdout.splitlines()[-1] == "loaded:", done.stderr
    assert "seed: 5 -> 6" in done.stderr or "slack_sdk" in done.stderr


@pytest.mark.runs
def test_the_launcher_refuses_the_same_before_it_starts_ranks(
    again: TinyRun, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    from launch.run import main as launch

    by_check = refusal(again("seed=6"))
    assert launch([*again("seed=6"), "--ranks", "2"]) == 78
    assert capsys.readouterr().err == by_check


def test_check_sees_shards_that_are_missing_or_cut(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path, says: Says
) -> None:
    """Otherwise a folder without any shards is called good, and the job fails on its GPUs."""
    folder = Path(shutil.copytree(tiny_data / "train", tmp_path / "shards"))
    shards = sorted(folder.glob("shard.*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    said = says("check", *tiny_run(f"data.train={folder}"), code=65)
    assert f"data.train={folder}: 2 shards do not match the index: {shards[0].name} (No such file" in said
    assert f"{shards[1].name} ({shards[1].stat().st_size:,} bytes, not {shards[1].stat().st_size + 1:,})" in said
    for shard in shards[2:]:
        shard.unlink()
    said = says("check", *tiny_run(f"data.validation={folder}"), code=65)
    assert f"data.validation={folder}: {len(shards):,} shards" in said


def test_check_says_what_it_did_not_look_at(
    tiny_run: TinyRun,
    tiny_data: Path,
    tmp_path: Path,
    says: Says,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise "good" looks like a promise about weights that a compute node without a network cannot get."""
    said = says("check", *tiny_run()).partition("\nnot checked:\n")[2]
    assert said == "  data.train, data.validation: contents of the shards; hashes are compared when they are read\n"
    monkeypatch.setattr(shard_sizes, "is_remote", lambda path: path == f"{tiny_data}/train")
    words = ["weights.init_from=nobody/has-this", f"checkpoint.copy_to=file://{tmp_path}/second"]
    said = says("check", *tiny_run(*words)).partition("\nnot checked:\n")[2]
    assert [line.partition(":")[0].partition("=")[0].strip() for line in said.splitlines()] == [
        *("data.train", "data.validation", "weights.init_from", "checkpoint.copy_to")
    ]
    assert f"data.train={tiny_data}/train: shards in a store\n" in said
    assert "weights.init_from=nobody/has-this: a model of the hub that is not in this machine's cache" in said


@pytest.mark.runs
def test_what_no_gpu_here_could_hold_is_refused_with_what_would_fit(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """The job would wait for its GPUs, load torch, and end with an allocator's page of numbers."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'RTX 3070, 8192'\necho 'RTX 4090, 24564'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    rows = ["phases.short.batch_rows=1048576", "phases.short.batch_warmup=null"]
    large = tiny_run("compute.device=auto", *rows, "phases.short.microbatch_tokens=67108864")
    said = refusal(large)
    found = re.search(
        r"phases\.short\.microbatch_tokens=67108864: needs [\d.]+ GB of a GPU by `plan`, and RTX 4090 has 25\.8 GB\. "
        r"Set phases\.short\.microbatch_tokens=(\d+)", said,
    )  # fmt: skip
    assert found is not None, "the larger of the two, since it is not known yet which of them trains"
    fitting = [*large[:-1], f"phases.short.microbatch_tokens={found[1]}"]
    assert main(["check", *fitting]) == 0
    assert main(["check", *fitting[:-1], "phases.short.microbatch_tokens=null"]) == 0, "it takes what fits"
    assert main(["check", *large, "--gpu", "b200"]) == 78, "still too small"
    assert main(["check", *large, "compute.device=cpu"]) == 0, "memory of a CPU is not predicted"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["check", *large]) == 0, "the GPU is unknown"
    assert main(["check", *large, "launch.gpu=H100"]) == 78
    assert main(["check", *large, "launch.gpu=gpu-of-our-cluster"]) == 0


@pytest.mark.runs
def test_a_disk_on_which_not_one_checkpoint_fits(
    again: TinyRun, tiny_run: TinyRun, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first save, a quarter of an hour into the run, would fail."""
    huge = ("model.hidden_size=65536", "model.num_heads=512", "model.intermediate_size=65536", "model.num_layers=400")
    for verb in ("check", "train"):
        said = says(verb, *tiny_run(*huge, "name=huge"), code=74)
        assert re.search(r"huge: a checkpoint of this model takes [\d,]{16,} bytes, .* and [\d,]+ are free", said)
    monkeypatch.setattr(resolve, "free_bytes", lambda path: 0)
    assert main(["check", *again()]) == 0, "a finished run saves nothing more"


@pytest.mark.runs
def test_a_disk_holds_the_checkpoints_that_are_there_at_once(
    again: TinyRun, tmp_path: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new checkpoint is written before an old one is removed: with room for one, the second save would fail."""
    config = load_run(again())
    each = checkpoint_bytes(config.model, config.objective, config.optim)
    shutil.rmtree(max((tmp_path / "runs/tiny/checkpoints").glob("step-*")))  # its first phase is trained
    once, lower = ("phases.long=null", "name=new"), " lower checkpoint.keep=3,"
    for words, added, remedy in (
        (once, 1, ""),
        ((*once, "checkpoint.interval_seconds=900"), 2, ""),
        (("name=new",), 2, ""),
        ((*once, "checkpoint.interval_steps=2"), 4, lower),
        ((*once, "checkpoint.interval_steps=2", "checkpoint.keep=1"), 2, ""),
        ((*once, "checkpoint.interval_tokens=1500"), 2, ""),
        (("checkpoint.interval_steps=1",), 3, lower),
        (("checkpoint.interval_steps=1", "checkpoint.keep=1"), 1, ""),
    ):
        monkeypatch.setattr(resolve, "free_bytes", lambda path, room=added * each: room)
        assert main(["check", *again(*words)]) == 0, words
        monkeypatch.setattr(resolve, "free_bytes", lambda path, room=added * each - 1: room)
        said = says("check", *again(*words), code=74)
        assert f"adds {added} before it removes one, and {added * each - 1:,} are free on its disk." in said, words
        assert f"Free some space,{remedy} or set runs_folder to another disk." in said, words


def test_a_gpu_that_this_machine_lacks_is_named_as_not_looked_at(tiny_run: TinyRun, says: Says) -> None:
    assert "compute.device=cuda: there is no GPU here" in says("check", *tiny_run("compute.device=cuda"))


@pytest.mark.runs
def test_what_a_start_decides_is_in_its_folder(tiny_run: TinyRun, tmp_path: Path) -> None:
    """One file explains every automatic setting; config.yaml is the run with all of them."""
    words = tiny_run("phases.short.microbatch_tokens=null")
    assert main(["train", *words]) == 0
    folder = tmp_path / "runs/tiny"
    written = json.loads((folder / "resolved.json").read_text())
    assert written["ranks"] == 1 and written["written"]["phases.short.microbatch_tokens"] is None
    row = load_run([folder / "config.yaml"]).phases["short"].row_tokens
    assert written["decided"]["phases.short.microbatch_tokens"] == row, (
        "one row, since memory of a CPU is not predicted"
    )
    again = resolve.Resolved.from_json((folder / "resolved.json").read_text(), load_run(words[:1], words[1:]))
    assert again.config == load_run([folder / "config.yaml"]) and again.decided == written["decided"]


def test_what_another_process_has_resolved_is_of_the_same_run_and_version(tiny_run: TinyRun) -> None:
    words = tiny_run()
    asked = load_run(words[:1], words[1:])
    text = resolve.Resolved(asked, asked, 2).to_json()
    assert resolve.Resolved.from_json(text, asked).ranks == 2
    elsewhere = replace(asked, data=replace(asked.data, train="/a/copy"))  # a machine's own path
    assert resolve.Resolved.from_json(text, elsewhere).config.data.train == "/a/copy"
    with pytest.raises(ConfigError, match=r"resolved with other keys:\n  seed: 5 -> 6\nStart all processes with"):
        resolve.Resolved.from_json(text, replace(asked, seed=6))
    for key, value in (("format", 3), ("program", "0.0.1")):
        other = json.dumps(json.loads(text) | {key: value})
        with pytest.raises(ConfigError, match="was resolved by version .* Install the same version everywhere"):
            resolve.Resolved.from_json(other, asked)


@pytest.mark.runs
def test_rules_and_data_are_looked_at_once_in_a_start(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    for name in ("check", "check_data"):
        original = getattr(resolve, name)
        monkeypatch.setattr(
            resolve, name, lambda *given, name=name, original=original: (looked.append(name), original(*given))[1]
        )
    words = tiny_run("phases.long.tokens=1000")
    for verb in ("train", "plan", "inspect", "eval"):
        assert main([verb, *words]) == 0
        assert looked == ["check", "check_data"], verb
        looked.clear()


def test_memory_is_compared_again_for_other_gpus_alone(tiny_run: TinyRun) -> None:
    """A start looks once; but ranks on a smaller or a shared GPU than was seen are refused before their first step."""
    rows = ["phases.short.batch_rows=1048576", "phases.short.batch_warmup=null"]
    words = tiny_run("compute.device=auto", *rows, "phases.short.microbatch_tokens=4194304")
    seen = RunGpus("NVIDIA A", 10**12)
    run = resolve.resolve(load_run(words[:1], words[1:]), gpu=seen)
    again = resolve.Resolved.from_json(run.to_json(), run.written)
    assert again.gpu == seen
    for gpus in (replace(seen, memory_bytes=10**9), replace(seen, label="NVIDIA B", memory_bytes=10**9)):
        with pytest.raises(ConfigError, match=r"microbatch_tokens=4194304: needs .* and NVIDIA . has 1\.0 GB"):
            resolve.close_for_gpus(again, gpus)
    counted = replace(seen, memory_bytes=int(0.98 * seen.memory_bytes), per_node=1)
    assert resolve.close_for_gpus(again, counted).config.phases["short"].microbatch_tokens == 4_194_304


def test_a_rank_trusts_its_launcher_for_the_same_run_alone(tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a variable left by another launch would hide this run's mistakes."""
    words = tiny_run()
    asked = load_run(words[:1], words[1:])
    assert resolve.handed_over(asked, 2) is None
    monkeypatch.setenv(resolve.HANDED_OVER, "")
    launched = resolve.resolve(asked, 2, gpu=RunGpus("a GPU", 10**11))
    resolve.hand_over(launched)
    assert resolve.handed_over(asked, 2) == replace(launched, facts=None)
    assert resolve.handed_over(asked, 1) is None and resolve.handed_over(replace(asked, seed=6), 2) is None
