"""The sign of life of a worker: Optuna sends it within Study.optimize only, and a worker asks and tells."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from sqlalchemy.exc import SQLAlchemyError


@contextmanager
def beating(storage: RDBStorage, trial_id: int, seconds: float) -> Iterator[None]:
    """Tell the database every few seconds that an attempt's worker lives."""
    end = threading.Event()

    def beat() -> None:
        while not end.wait(seconds):
            with suppress(OptunaError, SQLAlchemyError):  # a database that is away for a moment costs one beat
                storage.record_heartbeat(trial_id)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
