"""Limit the threads of the tokenizers library, so that workers forked later inherit none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tokenizer_threads(allowed: bool) -> Iterator[None]:
    """Let the tokenizers library use a thread for each core, or only the calling one."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if allowed else "false"  # the library reads it at every call
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
