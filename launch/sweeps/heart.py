"""The sign of life of a worker: Optuna sends it within Study.optimize only, and a worker asks and tells."""

from __future__ import annotations

import threading
from types import TracebackType

from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from sqlalchemy.exc import SQLAlchemyError


class Heart:
    """Tells the database every few seconds that an attempt's worker lives; a context manager."""

    def __init__(self, storage: RDBStorage, trial_id: int, seconds: float) -> None:
        self._storage = storage
        self._trial_id = trial_id
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self._storage.record_heartbeat(self._trial_id)
            except (OptunaError, SQLAlchemyError):
                continue  # a database that is away for a moment costs one beat
