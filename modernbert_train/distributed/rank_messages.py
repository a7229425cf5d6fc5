"""Messages between ranks outside the training step, through the rendezvous store.

Collectives cannot be used: they would interleave with the step's. Messages are small JSON values, each under a
key that is written once.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modernbert_train.core.text import first_line
from modernbert_train.core.torch_internals import default_store
from modernbert_train.errors import RunError

_PREFIX = "modernbert-train/mail"
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.01, 0.25
_numbers = itertools.count()  # all ranks create their mailboxes in the same order


class Mailbox:
    """This rank's mailbox; all ranks create theirs at the same point of the program."""

    def __init__(self) -> None:
        self._store = default_store().clone()  # a separate connection: collectives wait on the first one
        self._name = f"{_PREFIX}/{next(_numbers)}"

    def post(self, key: str, message: Any) -> None:
        """Write a message.

        Raises:
            RunError: the store is gone.
        """
        self._ask(lambda: self._store.set(f"{self._name}/{key}", json.dumps(message)))

    def collect(self, keys: Sequence[str], seconds: float, on_poll: Callable[[], object] = lambda: None) -> list[Any]:
        """Return the messages under some keys, waiting until all of them are there.

        Args:
            keys: of the messages.
            seconds: longest wait.
            on_poll: called at each poll.

        Raises:
            RunError: the store is gone.
            TimeoutError: some are missing; its argument is the list of their keys.
        """
        names = [f"{self._name}/{key}" for key in keys]
        deadline, pause = time.monotonic() + seconds, _FIRST_LOOK_SECONDS
        while not self._ask(lambda: self._store.check(names)):
            if time.monotonic() > deadline:
                arrivals = [self._ask(partial(self._store.check, [name])) for name in names]
                raise TimeoutError([key for key, arrived in zip(keys, arrivals, strict=True) if not arrived])
            on_poll()
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        return [json.loads(self._ask(partial(self._store.get, name))) for name in names]

    def forget(self, keys: Sequence[str]) -> None:
        """Delete messages that all ranks have read."""
        for key in keys:
            self._ask(partial(self._store.delete_key, f"{self._name}/{key}"))

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise RunError(f"the store that the ranks met in is gone: {first_line(error)}") from error
