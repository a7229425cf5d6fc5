"""Tests of the CUDA build without a GPU: `make test-cuda`. With other builds the whole folder is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_build.null import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
