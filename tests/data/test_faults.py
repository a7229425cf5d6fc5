"""Faults other than damaged shards: workers that die or hang, and a fault that only one rank meets.

If this breaks, a machine full of GPUs waits for a process that is gone, or a job ends without a reason.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from modernbert_train.data.workers import LOOK_SECONDS, deliveries
from modernbert_train.errors import DataError, RunError
from tests.support import forked
from tests.support.make_shards import make_documents, make_shards
from tests.support.paths import ROOT
from tests.support.tiny_run import TinyRun
from tests.support.unwatched_ranks import run_ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.runs, pytest.mark.timeout(200)]  # a busy machine takes long to import torch


class Work(Dataset[Any]):
    """Items that tell who made them; some do harm."""

    def __init__(self, harm: dict[int, str]) -> None:
        self._harm = harm

    def __getitem__(self, index: int) -> Any:
        harm = self._harm.get(index)
        if harm == "raise":
            raise OSError(5, "a disk's error")
        if harm == "exit":
            os._exit(3)
        if harm in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[harm])
        return index, os.getpid()

    def __len__(self) -> int:
        return 40


def items(harm: dict[int, str], num_workers: int = 2, timeout_seconds: float = 30.0) -> Iterator[Any]:
    loader = DataLoader(Work(harm), batch_size=None, num_workers=num_workers, timeout=LOOK_SECONDS, prefetch_factor=2)
    return deliveries(loader, timeout_seconds)


SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "sh")


@pytest.mark.skipif(subprocess.run([*SMALL, "true"], capture_output=True).returncode, reason="needs the right to mount")
def test_shared_memory_that_is_too_small_is_reported_with_the_remedy() -> None:
    """Docker gives 64 MB, some clusters less; it used to be reported as our bug."""
    words = "from tests.data.test_faults import items; next(items({}))"
    ended = subprocess.run([*SMALL, sys.executable, "-c", words], capture_output=True, text=True, cwd=ROOT, check=False)
    last = ended.stderr.splitlines()[-1]
    assert "StorageError: /dev/shm: is too small for the queues of data.num_workers=2. Give the container more" in last


@pytest.mark.parametrize(
    ("harm", "told", "num_workers"), [("SIGKILL", "killed by SIGKILL", 1), ("exit", "exit code 3", 2)]
)
def test_a_worker_that_dies_is_named(harm: str, told: str, num_workers: int) -> None:
    with pytest.raises(RunError, match=rf"data worker {9 % num_workers} \(process \d+\): .*{told}.*data\.num_workers"):
        list(items({9: harm}, num_workers))


def test_a_worker_that_dies_while_nobody_waits_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would raise in the middle of a step, where the error is taken for the step's, or swallowed."""
    work = items({})
    _, process = next(work)
    os.kill(process, signal.SIGKILL)
    time.sleep(1.0)  # a step: nothing is raised in it
    with pytest.raises(RunError, match=rf"\(process {process}\): killed by SIGKILL"):
        list(work)


class Slow:
    """A sampler that takes its time over the first number, in which an import gives up when it is interrupted."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __iter__(self) -> Iterator[int]:
        deadline = time.monotonic() + self._seconds
        try:
            while time.monotonic() < deadline:
                time.sleep(0.01)
        except RuntimeError:
            raise ImportError("no such module") from None
        yield from range(40)


@pytest.mark.parametrize(("harm", "told"), [("SIGKILL", "killed by signal: Killed"), ("exit", "exited unexpectedly")])
def test_a_worker_that_dies_while_others_are_started_is_named(harm: str, told: str) -> None:
    """torch looks after workers before we can tell it not to; its error was called a bug, with a traceback."""

    def die(worker: int) -> None:
        os._exit(3) if harm == "exit" else os.kill(os.getpid(), signal.SIGKILL)

    loader = DataLoader(
        Work({}), sampler=Slow(5.0), batch_size=None, num_workers=2, timeout=LOOK_SECONDS, worker_init_fn=die
    )
    with pytest.raises(RunError, match=rf"data worker process \d+: {told}.*data\.num_workers"):
        next(deliveries(loader, 30.0))


def test_a_worker_that_hangs_is_named_after_the_time_stated() -> None:
    with pytest.raises(RunError, match=r"data worker 1 \(process \d+\): no batch for 8 s \(data\.worker_time"):
        list(items({9: "SIGSTOP"}, timeout_seconds=8.0))


class Endless:
    """An object that cannot be received, like memory from a worker that froze while sending it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (1000.0,)


class EndlessWork(Work):
    def __getitem__(self, index: int) -> Any:
        return Endless() if index == 5 else super().__getitem__(index)


def test_a_worker_that_freezes_while_it_hands_a_batch_over_is_named_too() -> None:
    """torch's timeout is over by then: the run stood still for ever."""
    loader = DataLoader(EndlessWork({}), batch_size=None, num_workers=2, timeout=LOOK_SECONDS, prefetch_factor=2)
    with pytest.raises(RunError, match=r"data worker 1 \(process \d+\): no batch for 1\.5 s \(data\.worker_time"):
        list(deliveries(loader, 1.5))


def test_a_slow_worker_is_waited_for() -> None:
    """The short timeout that torch is given must not end a run whose batches take longer than it."""
    work = items({4: "SIGSTOP"}, num_workers=1)
    processes = [next(work)[1] for _ in range(2)]
    waker = subprocess.Popen(["sh", "-c", f"sleep {2.5 * LOOK_SECONDS}; kill -CONT {processes[0]}"])
    assert [item[0] for item in work] == list(range(2, 40))
    waker.wait()


def test_an_error_raised_in_a_worker_is_not_taken_for_a_dead_one() -> None:
    with pytest.raises(OSError, match="Caught OSError in DataLoader worker process"):
        list(items({9: "raise"}))


def one_bad_document(tiny_data: Path, folder: Path) -> str:
    """Shards of which the damaged one holds a single short document, so that only one rank reads it; its name."""
    lengths = [2000, 2000, 40, 2000, 2000]  # a long document fills a shard
    make_shards(folder, make_documents(tiny_data / "tokenizer", lengths, seed=8), tiny_data / "tokenizer", 4250)
    shards = json.loads((folder / "index.json").read_text())["shards"]
    assert [shard["samples"] for shard in shards] == [1] * 5
    path = folder / str(shards[2]["zip_data"]["basename"])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


FAIL = """
import os, sys, time
import torch, torch.distributed as dist
from modernbert_train.errors import DataError
from modernbert_train.distributed.fail_together import failing_together
dist.init_process_group("gloo")
try:
    with failing_together():
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            raise DataError("a shard is damaged")
        dist.all_reduce(torch.ones(1))  # for ever
except DataError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_an_error_of_the_rank_that_holds_the_store_ends_the_other_in_its_collective() -> None:
    found = run_ranks("-c", FAIL)
    assert [code for code, _ in found] == [DataError.exit_code] * 2
    assert re.search(r"^error: rank 0 on \S+: a shard is damaged", found[1][1], re.M)


@pytest.mark.timeout(120)
def test_a_shard_that_one_rank_meets_ends_all_ranks_with_its_name(
    tiny_run: TinyRun, tiny_data: Path, tmp_path: Path
) -> None:
    name = one_bad_document(tiny_data, tmp_path / "broken")
    words = tiny_run(f"data.train={tmp_path / 'broken'}", "data.num_workers=1", "phases.short.tokens=40000")
    found = run_ranks("-m", "modernbert_train", "train", *words)
    assert [code for code, _ in found] == [DataError.exit_code] * 2, found
    for _, output in found:
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert re.search(rf"/broken/{name}: is damaged: its xxh64 is \w+, index.json says \w+\. Restore", line)
        assert "Traceback" not in output
    assert sum("error: rank " in output for _, output in found) == 1  # the other one met the shard itself


@pytest.mark.timeout(120)
def test_a_killed_worker_ends_a_whole_run_with_a_message(tiny_run: TinyRun, tmp_path: Path) -> None:
    """As the kernel does when memory runs out: no traceback, the cause and what to do."""
    words = tiny_run("data.num_workers=1", "phases.short.tokens=400000")
    process = forked.Popen(
        [sys.executable, "-m", "modernbert_train", "train", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    until(lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), 120)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    for worker in workers.split():
        os.kill(int(worker), signal.SIGKILL)
    _, output = process.communicate(timeout=50)
    assert process.returncode == RunError.exit_code
    assert re.search(r"^error: data worker 0 \(process \d+\): killed by SIGKILL\. If the machine ran out", output, re.M)
    assert "Traceback" not in output


def test_the_watch_waits_for_nobody_between_two_batches() -> None:
    """With a deadline left over it would kill healthy workers in the middle of a long evaluation."""
    batches = items({}, num_workers=1)
    assert next(batches)[0] == 0
    watch = inspect.getgeneratorlocals(batches)["watch"]  # type: ignore[arg-type]
    assert watch.deadline is None
    assert next(batches)[0] == 1 and watch.deadline is None and not watch.over
    batches.close()  # type: ignore[attr-defined]
