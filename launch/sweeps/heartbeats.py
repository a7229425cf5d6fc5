"""Heartbeat of a worker: Optuna sends it only within Study.optimize, and a worker uses `ask` and `tell`.

Optuna's thread ends at the first error of the database, and a live trial would count as lost; this one skips a beat.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage
from sqlalchemy.exc import SQLAlchemyError


@contextmanager
def heartbeats(storage: RDBStorage, trial_id: int, seconds: float) -> Iterator[None]:
    """Send a heartbeat to the database every few seconds while an attempt runs."""
    end = threading.Event()

    def beat() -> None:
        while not end.wait(seconds):
            with suppress(OptunaError, SQLAlchemyError):  # if the database is away for a moment, skip one heartbeat
                storage.record_heartbeat(trial_id)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
