"""A store that a test has for itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modernbert_train.core import read_once
from modernbert_train.data import remote
from tests.support.s3 import Store


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    store = Store()
    yield store
    store.stop()


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    server.is_the_one(monkeypatch)
    server.fault, server.faults_left, server.faulty_method = None, 0, "GET"
    server.downloads.clear()
    forget()
    yield server
    forget()


def forget() -> None:
    """Begin as a new process does."""
    remote._remote_folder.cache_clear()
    read_once._known.clear()
