from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints.tools.small_run import SmallRun


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SmallRun:
    return SmallRun(tmp_path, capsys)


@pytest.fixture
def copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SmallRun:
    """Return a run with a replica that holds steps 300 and 500."""
    run = SmallRun(tmp_path, capsys, copies=True)
    run.copy(300, 500)
    return run
