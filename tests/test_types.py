"""Types, as `make lint` checks them; among the tests, so that they are checked beside those and not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.runs
def test_types_fit() -> None:
    root = Path(__file__).resolve().parents[1]
    command = [Path(sys.executable).with_name("pyrefly"), "check", "--python-interpreter-path", sys.executable]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
