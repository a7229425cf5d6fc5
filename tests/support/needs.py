"""Skip a file whose package is missing, without importing it: each of the test processes reads every file."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str, reason: str) -> None:
    """Skip the test file that calls this while it is imported, unless the package is installed."""
    if find_spec(package) is None:
        pytest.skip(reason, allow_module_level=True)
