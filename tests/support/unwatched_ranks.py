"""Two ranks that no launcher watches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support import forked
from tests.support.paths import ROOT
from tests.support.waiting import free_port


def ranks_environment() -> list[dict[str, str]]:
    """Two ranks without a launcher, so only they can end each other."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


def run_ranks(
    *command: str, each: Sequence[Sequence[str]] = ((), ()), waited_for: Sequence[int] = (0, 1), **variables: str
) -> list[tuple[int, str]]:
    """Return exit code and messages of two processes that no launcher watches.

    Args:
        each: more words of each rank's command.
        waited_for: ranks whose end is waited for, and returned.
        variables: more of the environment; {rank} in a value is the rank.
    """
    started = [
        forked.Popen(
            [sys.executable, *command, *words],
            env=environment | {name: value.format(rank=environment["RANK"]) for name, value in variables.items()},
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for environment, words in zip(ranks_environment(), each, strict=True)
    ]
    try:
        outputs = [started[rank].communicate(timeout=180)[1] for rank in waited_for]
        return [(started[rank].returncode, output) for rank, output in zip(waited_for, outputs, strict=True)]
    finally:
        for process in started:
            process.kill()
