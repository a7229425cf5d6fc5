"""Composer's callbacks and loggers by name: the table matches Composer, metrics are right, mistakes are found early."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from modernbert_train.__main__ import main, read_run
from modernbert_train.config.callbacks import ARGUMENTS, GPU_ONLY, REFUSED
from modernbert_train.train.callbacks import CALLBACKS, LOGGERS, build_callbacks
from tests.support.runs import records
from tests.support.tiny_run import TinyRun

CLASSES = {"callbacks": CALLBACKS, "loggers": LOGGERS}
SHORT = ("phases.long=null", "phases.short.tokens=3000", "data.validation=null")


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Read Composer's file logger: key -> step -> value."""
    (file,) = folder.glob("log-*.txt")
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\[metric\]\[batch=(\d+)\]: (\S+): (-?[\d.]+|nan|inf) ", line):
            found[match[2]][int(match[1])] = float(match[3])
    return found


def snake(name: str) -> str:
    name = re.sub("MLFlow|WandB|MLPerf|CometML|MosaicML|NaN", lambda match: match[0].capitalize(), name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@pytest.mark.parametrize(
    ("section", "ending", "bases"),
    [("callbacks", "_callback", ()), ("loggers", "_logger", ("logger", "logger_destination"))],
)
def test_every_plugin_of_composer_is_accepted_or_refused_with_a_reason(
    section: str, ending: str, bases: tuple[str, ...]
) -> None:
    """A new callback of a newer Composer must be reviewed, not answered with "unknown key"."""
    module = importlib.import_module(f"composer.{section}")
    names = {snake(name).removesuffix(ending) for name in module.__all__ if snake(name) not in bases}
    refused = {key.split(".")[1] for key in REFUSED if key.startswith(f"{section}.") and key.count(".") == 1}
    assert names == set(ARGUMENTS[section]) - {"trackio"} | refused
    assert not set(ARGUMENTS[section]) & refused


@pytest.mark.parametrize("section", ["callbacks", "loggers"])
def test_the_arguments_that_check_knows_are_those_of_composers_constructors(section: str) -> None:
    """`check` sees the table only; if it differs from Composer, a run is refused, or dies after `check`."""
    assert CLASSES[section].keys() == ARGUMENTS[section].keys()
    for name, made in CLASSES[section].items():
        parameters = inspect.signature(made).parameters.values()
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        real = {each.name for each in parameters if each.kind not in kinds}
        refused = {key.split(".")[2] for key in REFUSED if key.startswith(f"{section}.{name}.")}
        assert real == {*ARGUMENTS[section][name], *refused}, name
        assert not set(ARGUMENTS[section][name]) & refused


@pytest.mark.runs
def test_composers_callbacks_measure_this_trainer_truly(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Rates, norms and speeds of Composer's callbacks equal our record's, on our clock and batches."""
    plugins = (
        "callbacks.speed_monitor={window_size: 3, time_unit: seconds}",
        "callbacks={lr_monitor: {}, free_outputs: {}, system_metrics_monitor: {}}",
        "callbacks.optimizer_monitor={batch_log_interval: 2}",
        "callbacks.runtime_estimator={time_unit: seconds}",
        "loggers.file.capture_stdout=false",
        "loggers.in_memory={}",
    )
    assert main(["train", *tiny_run(*SHORT, *plugins)]) == 0
    found, record = logged(tmp_path / "runs/tiny"), records(tmp_path / "runs/tiny")
    assert len(record) > 6
    for entry in record:
        step = entry["step"]
        for group in (0, 1):  # the file has four digits
            assert found[f"lr-StableAdamW/group{group}"][step] == pytest.approx(entry["lr"], abs=6e-5)
        assert found["train/loss"][step] == pytest.approx(entry["loss"], abs=6e-5)
        if step % 2 == 0:
            assert found["l2_norm/grad/global"][step] == pytest.approx(entry["grad_norm"], abs=2e-4)
    window = record[-4:]  # three steps; the first line gives their start
    speed = {unit: found[f"throughput/{unit}_per_sec"][window[-1]["step"]] for unit in ("batches", "samples", "tokens")}
    assert speed["samples"] / speed["batches"] == pytest.approx(sum(e["rows"] for e in window[1:]) / 3, rel=1e-4)
    tokens = window[-1]["tokens"] - window[0]["tokens"]
    assert speed["tokens"] / speed["batches"] == pytest.approx(tokens / 3, rel=1e-4)
    remaining = found["time/remaining_estimate"]
    assert len(remaining) >= 5 and remaining[max(remaining)] <= remaining[min(remaining)]
    memory = found["cpu_memory_percent"]
    assert len(memory) == len(record) and 0 < max(memory.values()) < 100


def test_tensorboard_gets_every_step(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Only where it is installed; see docs/composer.md."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main(["train", *tiny_run(*SHORT, "loggers.tensorboard={}")]) == 0
    record = records(tmp_path / "runs/tiny")
    losses: dict[int, float] = {}
    for file in (tmp_path / "runs/tiny/tensorboard/tiny").glob("events*"):
        events = EventAccumulator(str(file)).Reload()
        if "train/loss" in events.Tags()["scalars"]:
            losses |= {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == {entry["step"]: pytest.approx(entry["loss"], rel=1e-6) for entry in record}


def test_mlflow_gets_every_step_and_a_restart_continues_in_the_same_run(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it is installed; see docs/composer.md."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    server = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow_words = f"loggers.mlflow={{tracking_uri: '{server}', log_system_metrics: false}}"
    words = tiny_run(*SHORT, mlflow_words, "checkpoint.interval_steps=4")
    assert main(["train", *words]) == 0
    shutil.rmtree(max((tmp_path / "runs/tiny/checkpoints").iterdir()))
    assert main(["train", *words]) == 0
    client = mlflow.MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("modernbert-train").experiment_id])
    found = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "train/loss")}
    assert found == {entry["step"]: pytest.approx(entry["loss"]) for entry in records(tmp_path / "runs/tiny")}
    assert run.data.params["optim.lr"] == "0.005"


@pytest.mark.runs
def test_trackio_gets_every_step_without_a_network_and_a_restart_goes_on_in_the_same_run(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board on this machine has each loss once more where the restart repeats a step, and the configuration."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "board"))  # read when the package is imported
    trackio = pytest.importorskip("trackio")
    words = tiny_run(*SHORT, "loggers.trackio={group: tiny}", "checkpoint.interval_steps=4")
    assert main(["train", *words]) == 0
    first = records(tmp_path / "runs/tiny")
    shutil.rmtree(max((tmp_path / "runs/tiny/checkpoints").iterdir()))
    assert main(["train", *words]) == 0
    (run,) = trackio.Api().runs("modernbert-train")
    assert run.name.startswith("tiny-") and run.config["optim.lr"] == 0.005 and run.config["_Group"] == "tiny"
    found = trackio.sqlite_storage.SQLiteStorage.get_logs("modernbert-train", run.name)
    losses = {entry["step"]: entry["train/loss"] for entry in found if "train/loss" in entry}
    assert losses == {entry["step"]: pytest.approx(entry["loss"]) for entry in records(tmp_path / "runs/tiny")}
    assert len([entry for entry in found if "train/loss" in entry]) > len(first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("callbacks.speed_monitor.time_unit=weeks", "Composer's SpeedMonitor refuses this (Invalid time_unit: weeks"),
        ("callbacks.speed_monitor.window_size=ten", "Composer's SpeedMonitor refuses this"),
        ("callbacks.memory_monitor={}", "measures GPUs only, and this run trains on a CPU. Set callbacks.memory_moni"),
    ],
)
def test_what_check_cannot_see_is_refused_before_anything_is_made(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["train", *tiny_run("compute.device=auto", words)]) == 78
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_callbacks_that_measure_gpus_are_there_on_gpus(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Their files go into the run's folder."""
    words = [f"callbacks.{name}={{}}" for name in GPU_ONLY]
    config = read_run(tiny_run("compute.device=auto", *words))
    built = build_callbacks(config.callbacks, Path(config.folder), torch.device("cuda"))
    assert [type(each) for each in built] == [CALLBACKS[name] for name in GPU_ONLY]
    for each in built[1:]:
        assert each.folder.startswith(str(tmp_path / "runs/tiny/")) and each.remote_file_name is None  # type: ignore[attr-defined]
