"""Tests of Triton kernels by values: `make test` skips them with the CPU build of torch, which lacks Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("file", ["tests/optim/test_fused.py", "tests/models/test_tiles.py"])
def test_kernels_compute_what_they_should(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1780)  # minutes of one quiet core
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
