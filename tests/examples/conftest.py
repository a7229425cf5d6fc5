"""Exported encoders, like fine-tuning's, and files of words that encode their type or class."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from tests.evaluate.finetune.conftest import models, one_thread, tokenizer  # noqa: F401
from tests.support.labelled import BAD, GOOD, PLAIN  # noqa: F401


@contextmanager
def offline() -> Iterator[None]:
    """No request goes to another machine."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("asks the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield
