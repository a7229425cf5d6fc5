"""A store for copies of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.s3 import Store


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    store = Store()
    yield store
    store.stop()


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    server.is_the_one(monkeypatch)
    server.fault, server.faults_left, server.faulty_method = None, 0, "PUT"
    yield server
    server.fault = None
