"""A folder that plugins are imported from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from modernbert_train.config.schema import VARIANTS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path; its modules are unloaded afterwards."""
    (tmp_path / "lib").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    with ExitStack() as restored:
        for table in VARIANTS.values():
            restored.enter_context(patch.dict(table))
        yield tmp_path / "lib"
    forget(tmp_path / "lib")


def forget(lib: Path) -> None:
    """Return the modules that a new process has not imported."""
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(lib)):
            del sys.modules[name]
    importlib.invalidate_caches()
