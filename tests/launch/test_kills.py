"""kill -9 of a launcher, a rank or a data worker: the rest ends within seconds, and leaves nothing on the machine.

If this breaks, orphaned ranks keep the GPUs' memory, and temporary folders pile up for years.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modernbert_train.distributed import scratch
from tests.launch.moments import LAUNCH, VERB, begin
from tests.support.jobs import children, environment, wait_for_steps
from tests.support.tiny_run import TinyRun
from tests.support.waiting import catches, until

MARK = "TESTED_BY"
CACHE = f"torchinductor_{os.getuid()}"  # torch's compilation cache is meant to stay


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a temporary directory with a short path for the runs of one test; the path identifies their processes."""
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv(MARK, folder)
        yield Path(folder)


def processes_of(home: Path) -> list[int]:
    """Return the living processes that a test has started, and their children."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"{MARK}={home}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def wait_until_gone(home: Path, seconds: float = 60) -> float:
    """Wait until all processes of a test have ended; return the seconds."""
    return until(lambda: not processes_of(home), seconds)


def workers_of(ranks: list[int]) -> list[int]:
    return [worker for rank in ranks for worker in children(rank)]


def wait_for_workers(process: subprocess.Popen[str]) -> None:
    """Wait until every rank of a launcher has its data workers."""
    while len(workers_of(children(process.pid))) < 4:
        assert process.poll() is None
        time.sleep(0.02)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {CACHE}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_that_have_not_met_yet_die_with_their_launcher(tiny_run: TinyRun, tmp_path: Path, home: Path) -> None:
    """They import for half a minute, and used to check for their launcher only afterwards. The next start cleans up."""
    process = begin([*LAUNCH, *tiny_run(), "--ranks", "2"], tmp_path)
    while len([rank for rank in children(process.pid) if catches(rank, signal.SIGTERM)]) < 2:
        assert process.poll() is None, (tmp_path / "errors").read_text()
        time.sleep(0.005)
    process.kill()
    process.wait()
    wait_until_gone(home, 10)
    assert left_in(home)  # to be removed by the next start
    subprocess.run([*VERB, "check", *tiny_run()], env=environment(), check=True, capture_output=True, timeout=60)
    assert left_in(home) == set()


def test_folders_of_the_living_and_of_others_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a lock is alive, however old the folder is; a folder without our name is not ours."""
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(home))
    monkeypatch.setattr(scratch, "_mine", None)
    mine = scratch.folder()
    (mine / "file").touch()
    os.utime(mine, (0, 0))
    dead = [home / f"{scratch.PREFIX}abcdefgh", home / f"{scratch.PREFIX}12345678"]
    others = [home / "tmpabcdefgh", home / "modernbert-train-abcdefgh"]
    for path in (*dead, *others):
        (path / "inside").mkdir(parents=True)
    assert scratch.folder() == mine
    scratch.remove_dead()
    assert left_in(home) == {mine.name, *(path.name for path in others)} and (mine / "file").exists()


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_nothing_remains_of_many_kills(tiny_run: TinyRun, tmp_path: Path, home: Path) -> None:
    """Launchers, ranks and data workers one after another, at random times from the first line of main on."""
    words = tiny_run("data.num_workers=2", "phases.short.tokens=400000", "checkpoint.interval_steps=5")
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    draw = random.Random(8)
    began = time.monotonic()
    process = begin([*LAUNCH, *words, "--ranks", "2"], tmp_path)
    wait_for_steps(tmp_path / "runs/tiny", 8, [process])
    span = time.monotonic() - began
    process.kill()
    process.wait()
    wait_until_gone(home)
    for number in range(21):
        process = begin([*LAUNCH, *words, "--ranks", "2"], tmp_path)
        if number % 3 < 2:
            time.sleep(span * draw.random())
        else:
            wait_for_workers(process)
            time.sleep(3 * draw.random())
        ranks = children(process.pid)
        chosen = [[process.pid], ranks, workers_of(ranks)][number % 3]
        victim = draw.choice(chosen or [process.pid])
        os.kill(victim, signal.SIGKILL)
        code = process.wait(150)
        seconds = wait_until_gone(home, 20)
        kind = "launcher" if victim == process.pid else "rank" if victim in ranks else "worker"
        print(
            f"{number:2}  {kind:8}  {code:4}  all gone after {seconds:.2f} s  left {sorted(left_in(home))}", flush=True
        )
        assert code == (-signal.SIGKILL if kind == "launcher" else 70), (tmp_path / "errors").read_text()
    done = subprocess.run([*VERB, "check", *words], env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert left_in(home) == set()
    until(lambda: {path.name for path in Path("/dev/shm").iterdir()} <= shared)  # other tests may be using it
