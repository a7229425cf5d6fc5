"""A store for copies of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.s3 import Store
from tests.support.store import server

__all__ = ["server", "store"]


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    server.is_the_one(monkeypatch)
    server.fault, server.faults_left, server.faulty_method = None, 0, "PUT"
    yield server
    server.fault = None
