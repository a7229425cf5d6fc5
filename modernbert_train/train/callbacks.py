"""Build Composer's callbacks and loggers from the run's `callbacks:` and `loggers:` sections.

config/callbacks.py checks those sections long before Composer is imported. This file holds the classes, and the
defaults that differ because Composer's would write outside the run's folder or require an account.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import callbacks, loggers
from composer.core import Callback
from composer.loggers import LoggerDestination
from composer.utils import dist

from modernbert_train.config.callbacks import GPU_ONLY, REFUSED
from modernbert_train.config.packages import missing_for
from modernbert_train.core.files import os_errors_as
from modernbert_train.errors import ConfigError
from modernbert_train.train.composer_internals import CurrentWandB
from modernbert_train.train.loggers import Harmless, Trackio

Section = Mapping[str, dict[str, Any]]  # a section: name -> arguments
CALLBACKS: dict[str, type[Callback]] = {
    "free_outputs": callbacks.FreeOutputs,
    "lr_monitor": callbacks.LRMonitor,
    "memory_monitor": callbacks.MemoryMonitor,
    "memory_snapshot": callbacks.MemorySnapshot,
    "oom_observer": callbacks.OOMObserver,
    "optimizer_monitor": callbacks.OptimizerMonitor,
    "runtime_estimator": callbacks.RuntimeEstimator,
    "speed_monitor": callbacks.SpeedMonitor,
    "system_metrics_monitor": callbacks.SystemMetricsMonitor,
}
LOGGERS: dict[str, type[LoggerDestination]] = {
    "cometml": loggers.CometMLLogger,
    "console": loggers.ConsoleLogger,
    "file": loggers.FileLogger,
    "in_memory": loggers.InMemoryLogger,
    "mlflow": loggers.MLFlowLogger,
    "neptune": loggers.NeptuneLogger,
    "slack": loggers.SlackLogger,
    "tensorboard": loggers.TensorboardLogger,
    "trackio": Trackio,
    "wandb": CurrentWandB,
}


def build_callbacks(section: Section, folder: Path, device: torch.device) -> list[Callback]:
    """Build the callbacks that the run names, on every rank, since some of them communicate.

    Args:
        section: the run's section `callbacks`.
        folder: the run's folder.
        device: this rank's device.

    Raises:
        ConfigError: a callback rejects its arguments, measures GPUs on a CPU, or lacks its package.
    """
    _require_packages("callbacks", section)
    built = []
    for name, settings in section.items():
        if name in GPU_ONLY and device.type == "cpu":
            raise ConfigError(
                f"callbacks.{name}: it measures GPUs only, and this run trains on a CPU. Set callbacks.{name}=false."
            )
        arguments = _callback_defaults(folder, name) | settings
        refused = f"callbacks.{name}={settings}: Composer's {CALLBACKS[name].__name__} refuses this"
        remedy = "See its documentation for the arguments."
        with os_errors_as(ConfigError, refused, remedy, TypeError, ValueError, ImportError):
            built.append(CALLBACKS[name](**arguments))
    return built


def own_callbacks(passed: Sequence[Callback | type[Callback]]) -> list[Callback]:
    """Return the callbacks that a program passes to its run; a class is instantiated at each start, without arguments.

    Raises:
        ConfigError: one is not a callback, cannot be made, or is a callback of Composer's that cannot work here.
    """
    built = []
    for number, each in enumerate(passed):
        where = f"callbacks[{number}]={each!r:.80}"
        if isinstance(each, type) and issubclass(each, Callback):
            with os_errors_as(ConfigError, f"{where}: cannot be made", "Give an instance instead.", TypeError):
                each = each()
        if not isinstance(each, Callback):
            raise ConfigError(f"{where}: is no callback. Give subclasses of composer.Callback, or instances of them.")
        if isinstance(each, LoggerDestination):
            raise ConfigError(f"{where}: is a logger, and would receive no metrics here. Name it in loggers:.")
        for module in (base.__module__ for base in type(each).__mro__):
            if (reason := REFUSED.get(module.removeprefix("composer."))) is not None:
                raise ConfigError(f"{where}: cannot work here, {reason}. Remove it.")
        built.append(each)
    return built


def check_loggers(section: Section) -> None:
    """Check that every logger's package is installed.

    Raises:
        ConfigError: one is missing. Later failures, such as a server that does not answer, do not end the run: see
            `Harmless`.
    """
    _require_packages("loggers", section)


def _require_packages(name: str, section: Section) -> None:
    if missing := list(missing_for(name, section)):
        raise ConfigError("\n".join(missing))


def build_loggers(section: Section, folder: Path) -> list[LoggerDestination]:
    """Build the loggers that the run names, on rank 0 only; metrics.jsonl is always written and is not one of them."""
    if dist.get_global_rank() != 0:
        return []
    return [Harmless(name, _maker(name, given, folder)) for name, given in section.items()]


def _maker(name: str, settings: dict[str, Any], folder: Path) -> Callable[[], LoggerDestination]:
    return lambda: LOGGERS[name](**_logger_arguments(name, settings, folder))


def _callback_defaults(folder: Path, name: str) -> dict[str, Any]:
    if name in ("memory_snapshot", "oom_observer"):
        return {"folder": f"{folder}/{name}-{_now()}", "remote_file_name": None}
    return {}


def _logger_arguments(name: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    if name == "wandb":
        init = {"mode": "offline", "dir": str(folder), "id": _kept_id(folder, name), "resume": "allow"}
        names = {"project": "modernbert-train", "name": folder.name}
        return names | settings | {"init_kwargs": init | settings.get("init_kwargs", {})}
    defaults: dict[str, dict[str, Any]] = {
        "file": {"filename": f"{folder}/log-{_now()}.txt"},
        "mlflow": {"experiment_name": "modernbert-train", "run_name": folder.name, "resume": True},
        "tensorboard": {"log_dir": f"{folder}/tensorboard"},
        "trackio": {"project": "modernbert-train"},
    }
    if name == "trackio":  # it resumes by the run's name and cannot be given a folder
        defaults[name]["name"] = f"{folder.name}-{_kept_id(folder, name)[:6]}"
    return defaults.get(name, {}) | settings


def _kept_id(folder: Path, logger: str) -> str:
    """Return the run's W&B id; it is kept in the run's folder so that a restart continues the same curves."""
    path = folder / f"{logger}.id"
    if not path.exists():
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _now() -> str:
    """Return a file-name part that is unique to this start of the run."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
