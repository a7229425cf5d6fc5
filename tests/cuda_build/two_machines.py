"""Two machines of two GPUs that compute nothing, as two launchers of the product, and a fault in one of them.

Linux namespaces give each a name and processes that the other cannot see. The product is unmodified; the fault comes
from the null device (null_faults.c), or is a signal.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modernbert_train.distributed.launched import BLAMED
from tests.cuda_build.front_door import Machine
from tests.support.paths import ROOT
from tests.support.waiting import free_port

GPUS = 2  # in each machine
_INSIDE = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_SETTLED = 3  # steps of a start after which the usual limits apply


def why_not() -> str | None:
    """Return the reason why such machines are impossible here, or None."""
    if shutil.which("unshare") is None:
        return "no `unshare` here"
    tried = subprocess.run([*_INSIDE, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@dataclass(frozen=True)
class End:
    """End of a launcher.

    Attributes:
        code: its exit code; None if it was still running.
        seconds: time after the fault.
        last: last line of its output.
        output: all of its output.
        blamed: the machine that a job file would exclude at the next start; "" if none.
    """

    code: int | None
    seconds: float
    last: str
    output: str
    blamed: str


@dataclass
class Pair:
    """The two launchers of a run.

    Attributes:
        machine: has the GPUs of both.
        processes: each launcher's namespace process.
    """

    machine: Machine
    processes: list[subprocess.Popen[bytes]]

    @property
    def when(self) -> Path:
        """The file that triggers the fault."""
        return self.machine.folder / "when"

    def output(self, node: int) -> str:
        return (self.machine.folder / f"node-{node}.txt").read_text(encoding="utf-8", errors="replace")

    def blamed(self, node: int) -> str:
        file = self.machine.folder / f"blamed-{node}"
        return file.read_text(encoding="utf-8").strip() if file.exists() else ""

    def until_told(self, words: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.output(0):
            assert time.monotonic() < deadline, (self.output(0), self.output(1))
            time.sleep(0.05)

    def until_settled(self, name: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self.machine.steps(name)) < _SETTLED:
            ended = [process.poll() for process in self.processes]
            assert ended == [None, None] and time.monotonic() < deadline, (ended, self.output(0), self.output(1))
            time.sleep(0.1)

    def lose(self, node: int) -> None:
        """Kill all processes of a machine, including its launcher, as in a power loss."""
        self.processes[node].kill()

    def ends(self, seconds: float, missing: Sequence[int] = ()) -> list[End]:
        """Wait this long for the launchers, except missing ones; the fault is now."""
        began = time.monotonic()
        took: dict[int, float] = {}
        waited = [node for node in (0, 1) if node not in missing]
        while len(took) < len(waited) and time.monotonic() - began < seconds:
            for node in waited:
                if self.processes[node].poll() is not None:
                    took.setdefault(node, time.monotonic() - began)
            time.sleep(0.05)
        found = []
        for node in waited:
            output = self.output(node)
            last = (output.splitlines() or [""])[-1]
            code, after = self.processes[node].poll(), took.get(node, seconds)
            found.append(End(code, after, last, output, self.blamed(node)))
        return found


@contextmanager
def started(machine: Machine, words: Sequence[str], fault: str = "", fault_seconds: float = 1) -> Iterator[Pair]:
    """Start both launchers of a run, and end them with the context."""
    (machine.folder / "nccl").unlink(missing_ok=True)
    pair, rendezvous = Pair(machine, []), f"127.0.0.1:{free_port()}"
    for node in range(2):
        gpus = ",".join(map(str, range(GPUS * node, GPUS * (node + 1))))
        settings = machine.environment(gpus) | {
            "NULL_DEVICE_WORKS": "1",
            "NULL_FAULT": fault,
            "NULL_FAULT_WHEN": str(pair.when),
            "NULL_FAULT_SECONDS": str(fault_seconds),
            BLAMED: str(machine.folder / f"blamed-{node}"),
        }
        place = ["--nodes", "2", "--ranks", str(GPUS), "--node-rank", str(node), "--rendezvous", rendezvous]
        # torch's agent identifies machines by address and process id, and both have this machine's address
        begin = 'hostname node-$0; for other in $(seq $0); do /bin/true; done; "$@"; exit $?'
        command = ["sh", "-c", begin, str(node), sys.executable, "launch/run.py"]
        with (machine.folder / f"node-{node}.txt").open("wb") as output:
            pair.processes.append(
                subprocess.Popen(
                    [*_INSIDE, *command, *words, *place],
                    cwd=ROOT,
                    env=settings,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        yield pair
    finally:
        for process in pair.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
