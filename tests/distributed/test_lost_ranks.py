"""A rank dies: the last line of the others names it and its host, at every moment, and never "this is a bug"."""

from __future__ import annotations

import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import wait_for_steps
from tests.support.tiny_run import TinyRun
from tests.support.unwatched_ranks import ranks_environment, run_ranks

HERE = socket.gethostname()

QUICK = """
from modernbert_train.distributed import fail_together, heartbeat
fail_together._LOOK_SECONDS, fail_together._HEARD_SECONDS, heartbeat._LISTEN_SECONDS = 0.1, 1.0, 0.1
fail_together.GRACE_SECONDS = 1.0
"""
DIE = (
    QUICK
    + """
import os, signal, sys, time
import torch, torch.distributed as dist
from modernbert_train.distributed.fail_together import failing_together
victim, moment = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
with failing_together():
    dist.all_reduce(torch.ones(1))
    time.sleep(1)  # long enough to hear of each other
    if dist.get_rank() == victim:
        os._exit(3) if moment == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    if moment == "reading":
        time.sleep(600)  # no connection is in use, so none breaks
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ValueError("what a library makes of it") from error
"""
)


@pytest.mark.runs
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("victim", "moment"), [(0, "exit"), (1, "reading")])
def test_the_last_line_names_the_dead_rank(victim: int, moment: str) -> None:
    """Rank 0 takes the store along, in which the others would look for who is gone."""
    code, output = run_ranks("-c", DIE, str(victim), moment)[1 - victim]
    assert code == 70
    assert output.splitlines()[-1].startswith(f"error: rank {victim} on {HERE}: is gone: its process ended")


FREEZE = (
    QUICK
    + """
import os, signal, sys, time
import torch, torch.distributed as dist
from modernbert_train.errors import StorageError
from modernbert_train.distributed.fail_together import failing_together
dist.init_process_group("gloo")
with failing_together(timeout_seconds=4):
    dist.all_reduce(torch.ones(1))
    time.sleep(1)  # long enough to hear of each other
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)
    if sys.argv[1] == "error":
        raise StorageError("a full disk")
    dist.all_reduce(torch.ones(1))
"""
)


@pytest.mark.runs
@pytest.mark.timeout(100)
@pytest.mark.parametrize("moment", ["collective", "error"])
def test_a_frozen_first_rank_is_named_though_it_holds_the_store(moment: str) -> None:
    """With RANK and MASTER_ADDR from a launcher, rank 0 has the store: its clients wait as long as it is frozen."""
    ((code, output),) = run_ranks("-c", FREEZE, moment, waited_for=[1])  # gloo alone would wait for half an hour
    if moment == "error":  # its own counts, and it exits although no rank can be informed
        assert code == 1 and output.splitlines()[-1].endswith("StorageError: a full disk")
        assert re.search("^warning: the other ranks could not be informed: .* does not answer$", output, re.M)
    else:
        assert code == 124
        assert output.splitlines()[-1].startswith(f"error: rank 0 on {HERE}: hangs: it holds ")


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_killed_at_random_moments_are_named_by_the_other(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Two ranks without a launcher, each with its own output; from the import to the last step, DDP and FSDP2."""
    draw = random.Random(13)
    for number in range(12):
        victim, how = draw.randrange(2), draw.choice([signal.SIGKILL, signal.SIGSEGV])
        strategy, tokens = draw.choice(["ddp", "fsdp2"]), draw.choice([2500, 40000])
        words = tiny_run(
            f"name=kill{number}",
            f"distributed.strategy={strategy}",
            f"phases.short.tokens={tokens}",
            "phases.short.batch_warmup=null",
            "distributed.timeout_seconds=30",
            "checkpoint.interval_steps=2",
            "data.num_workers=1",
        )
        logs = [tmp_path / f"{number}.{rank}.log" for rank in range(2)]
        started = []
        for log, environment in zip(logs, ranks_environment(), strict=True):
            with log.open("w") as output:
                command = [sys.executable, "-m", "modernbert_train", "train", *words]
                started.append(subprocess.Popen(command, env=environment, stderr=output, stdout=subprocess.DEVNULL))
        steps, delay = draw.choice([None, 1, 4]), draw.random()
        if steps is not None:
            wait_for_steps(tmp_path / f"runs/kill{number}", steps, started, 100)
        time.sleep(8 * delay if steps is None else delay)
        started[victim].send_signal(how)
        code = started[1 - victim].wait(150)
        if code == 0 or started[victim].wait(10) == 0:
            continue  # the run was over
        last = logs[1 - victim].read_text().splitlines()[-1]
        case = (number, strategy, victim, how.name, steps, last)
        named = rf"error: rank {victim} on (\S+|an unknown host): (is gone|hangs: no sign of life)"
        absent = r"error: rank 1 on \S+ cannot come to \S+, where the ranks meet: rank 0 is gone or never came"
        assert re.match(named if victim or steps else f"{named}|{absent}", last), case
        if steps is not None:
            assert code == 70 and f"rank {victim} on {HERE}: is gone: its process ended" in last, case
