"""Fixtures of several folders; helpers that tests import are in tests/support."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import RANK_VARIABLES, TINY_YAML, TinyRun, make_tiny_data


@pytest.hookimpl(optionalhook=True)  # the environment of `make test-cuda` lacks xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return what `-n logical` starts: tests that start processes wait half of their time, so two a core."""
    return 2 * (os.cpu_count() or 1)


@pytest.fixture(autouse=True)
def quick_tests_start_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test of `make test-quick` that starts a process; a run does too, when it asks git for the commit."""
    if any(request.node.get_closest_marker(mark) for mark in ("runs", "slow", "gpu")):
        return
    import modernbert_train.train.session  # noqa: F401  # its import starts programs itself

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("starts a process or trains a run: mark it @pytest.mark.runs", pytrace=False)

    if "CUDA_VISIBLE_DEVICES" not in os.environ:  # else counting GPUs would start nvidia-smi
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "fork", refuse)


@pytest.fixture(autouse=True)
def no_rank_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that Composer leaves in its process: a launcher would take itself for a rank."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `make_tiny_data`. Shared by the whole session: copy it before changing anything in it."""
    return make_tiny_data(tmp_path_factory.mktemp("tiny_data"))


@pytest.fixture
def tiny_run(tiny_data: Path, tmp_path: Path) -> TinyRun:
    """Gives the command line of a small run: tiny_run("checkpoint.interval_steps=2") -> [path of a YAML, override].

    Two phases, rows of 64 and then 128 tokens, a growing batch, 6,000 tokens in some 15 steps. The list goes to
    `main(["train", *words])`, or to `read_run(words)` for a RunConfig. The run lives in tmp_path/runs/tiny.
    """

    def words(*overrides: str) -> list[str]:
        file = tmp_path / "tiny.yaml"
        file.write_text(TINY_YAML.format(runs=tmp_path / "runs", data=tiny_data), encoding="utf-8")
        return [str(file), *overrides]

    return words
