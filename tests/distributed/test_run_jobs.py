"""Many commands as processes. If this breaks, a kill leaves unseen processes, or a stop loses their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modernbert_train.distributed.run_jobs import Job, last_words, run_all
from tests.support.jobs import alive
from tests.support.waiting import until

pytestmark = pytest.mark.runs
SAVES = "import os, signal, time; signal.signal(15, lambda *_: os._exit(75)); print('up', flush=True); time.sleep(60)"
PLACES: list[dict[str, str]] = [dict(os.environ)] * 2


def job(folder: Path, name: str, code: str) -> Job:
    return Job(name, [sys.executable, "-S", "-c", code], folder / "logs" / f"{name}.log")


def test_jobs_are_taken_as_places_get_free_and_end_with_their_codes(tmp_path: Path) -> None:
    """None means `not now`: a later job is run; one that its owner gives up gets a stop signal to save."""
    codes: dict[str, int] = {}

    def jobs() -> Iterator[Job | None]:
        yield job(tmp_path, "fails", "print('Error: of nobody\\nbye'); raise SystemExit(65)")
        yield job(tmp_path, "slow", SAVES)
        while "fails" not in codes:
            yield None
        yield job(tmp_path, "late", "pass")
        yield job(tmp_path, "killed", "import os; os.kill(os.getpid(), 9)")

    def look(running: Job) -> bool:
        return running.name == "slow" and "killed" in codes and "up" in running.log.read_text()

    assert not run_all(jobs(), PLACES, lambda ended, code: codes.update({ended.name: code}), look)
    assert codes == {"fails": 65, "late": 0, "killed": -signal.SIGKILL, "slow": 75}
    assert last_words(tmp_path / "logs" / "fails.log") == "Error: of nobody"
    assert last_words(tmp_path / "logs" / "late.log") == "it said nothing"


def test_an_error_of_ours_ends_all_others_first(tmp_path: Path) -> None:
    def ended(over: Job, code: int) -> None:
        raise RuntimeError(over.name)

    jobs = [job(tmp_path, "slow", SAVES), job(tmp_path, "over", "import time; time.sleep(0.5)")]
    with pytest.raises(RuntimeError, match="over"):
        run_all(iter(jobs), PLACES, ended)


OWNER = """
import os, sys
from pathlib import Path
from modernbert_train.distributed.run_jobs import Job, run_all
code = "import os; print(os.getpid(), flush=True); " + sys.argv[2]
jobs = [Job(str(n), [sys.executable, "-S", "-c", code], Path(sys.argv[1], str(n))) for n in range(3)]
sys.exit(33 if run_all(iter(jobs), [dict(os.environ)] * 2, lambda job, code: print(job.name, code, flush=True)) else 0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stop_is_passed_on_and_a_kill_leaves_nobody(number: signal.Signals, tmp_path: Path) -> None:
    """Also none of a command that knows nothing of us."""
    words = [sys.executable, "-c", OWNER, str(tmp_path), SAVES]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    logs = [tmp_path / "0", tmp_path / "1"]
    until(lambda: all(log.exists() and log.read_text().endswith("up\n") for log in logs))
    owner.send_signal(number)
    said, _ = owner.communicate(timeout=60)
    assert owner.returncode == (33 if number == signal.SIGTERM else -signal.SIGKILL)
    assert sorted(said.splitlines()) == (["0 75", "1 75"] if number == signal.SIGTERM else [])
    pids = [int(log.read_text().splitlines()[1]) for log in logs]
    until(lambda: not any(map(alive, pids)))
    assert not (tmp_path / "2").exists()
