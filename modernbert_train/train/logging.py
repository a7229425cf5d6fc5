"""Loggers that may fail without costing the run."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer.loggers import LoggerDestination, WandBLogger
from composer.utils import dist

from modernbert_train.config.schema import RunConfig


class Harmless(LoggerDestination):
    """Passes everything on to another logger until that one fails, then says so once and goes quiet.

    Args:
        name: what to call it in the warning.
        make: builds the logger; a failure here is survived too.
    """

    def __init__(self, name: str, make: Callable[[], LoggerDestination]) -> None:
        self._name = name
        self._logger: LoggerDestination | None = None
        self._logger = self._guard(make)

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # wandb ends failed logins with SystemExit-like errors
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"warning: {self._name} is off for the rest of this run: {error}", file=sys.stderr)
            self._logger = None

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        if self._logger is not None:
            inner = self._logger
            self._guard(lambda: inner.run_event(event, state, logger))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._logger is not None:
            inner = self._logger
            self._guard(lambda: inner.log_metrics(metrics, step))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._logger is not None:
            inner = self._logger
            self._guard(lambda: inner.log_hyperparameters(hyperparameters))


def _wandb_id(config: RunConfig) -> str:
    """The id of this run on W&B, kept in its folder so that a restart goes on with the same curves."""
    path = Path(config.folder) / "wandb.id"
    if not path.exists():
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def build_loggers(config: RunConfig) -> list[LoggerDestination]:
    """The loggers that the configuration switches on; metrics.jsonl is always written and is not one of them."""
    settings = config.logging.wandb
    if not settings.enabled or dist.get_global_rank() != 0:
        return []

    def make() -> LoggerDestination:
        return WandBLogger(
            project=settings.project,
            entity=settings.entity,
            name=config.name,
            tags=settings.tags,
            init_kwargs={"mode": settings.mode, "dir": config.folder, "id": _wandb_id(config), "resume": "allow"},
        )

    return [Harmless("wandb", make)]
