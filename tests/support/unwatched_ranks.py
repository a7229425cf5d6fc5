"""Two ranks that no launcher watches."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import forked
from tests.support.paths import ROOT
from tests.support.waiting import free_port


def ranks_environment() -> list[dict[str, str]]:
    """Two ranks without a launcher, so only they can end each other."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def run_ranks(*command: str) -> list[tuple[int, str]]:
    """Exit code and messages of two processes that no launcher watches over."""
    started = [
        forked.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for environment in ranks_environment()
    ]
    try:
        outputs = [process.communicate(timeout=180)[1] for process in started]
        return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]
    finally:
        for process in started:
            process.kill()
