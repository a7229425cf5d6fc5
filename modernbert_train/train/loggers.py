"""Loggers that may fail without costing the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.loggers import LoggerDestination

from modernbert_train.errors import RunError
from modernbert_train.train.composer_internals import without_broadcasts


class Trackio(LoggerDestination):
    """Log to Trackio: a database in TRACKIO_DIR on this machine, or a Space or server if one is named.

    Args:
        project: of the board.
        name: of the run; a run with this name is resumed.
        group: of runs.
        space_id: of a Hugging Face Space.
        server_url: of a Trackio server.
    """

    def __init__(
        self,
        project: str,
        name: str,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
    ) -> None:
        self._about: dict[str, Any] = {"project": project, "name": name, "group": group}
        self._about |= {"space_id": space_id, "server_url": server_url}
        self._run: Any = None

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Open the run: Trackio takes the configuration only then."""
        import trackio

        own = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = trackio.init(**self._about, **own, config=hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the metrics of a step."""
        if self._run is not None:
            self._run.log(metrics, step)

    def post_close(self) -> None:
        """Flush and close the run."""
        if self._run is not None:
            self._run.finish()


class Harmless(LoggerDestination):
    """Forwards everything to another logger; after its first failure it warns once and stops forwarding.

    It exists on rank 0 only. Composer's loggers for W&B and MLflow broadcast their ids to all ranks at startup; if the
    server did not answer, those ranks would wait, so the broadcast is skipped.

    Args:
        name: the logger's name in the warning.
        make: builds the logger; its failure is tolerated too.
    """

    def __init__(self, name: str, make: Callable[[], LoggerDestination]) -> None:
        self._name = name
        self._logger: LoggerDestination | None = None
        self._logger = self._guard(make)

    def _guard(self, call: Callable[[], Any]) -> Any:
        try:
            with without_broadcasts():
                return call()
        except BaseException as error:  # wandb ends failed logins with SystemExit-like errors
            if isinstance(error, KeyboardInterrupt | RunError):  # not raised by the logger
                raise
            print(f"warning: {self._name} is off for the rest of this run: {error}")
            self._logger = None

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        if self._logger is not None:
            inner = self._logger
            self._guard(lambda: inner.run_event(event, state, logger))

    def post_close(self) -> None:
        if self._logger is not None:
            self._guard(self._logger.post_close)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._logger is not None:
            inner = self._logger
            self._guard(lambda: inner.log_metrics(metrics, step))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._logger is not None:
            inner = self._logger
            self._guard(lambda: inner.log_hyperparameters(hyperparameters))
