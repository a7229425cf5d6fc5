"""Faults of the object store that checkpoints are copied to: a real S3 API on loopback in a separate process.

The run must end undisturbed by any fault of the store; then its folder is removed, as on a new machine, and the
same command must end in the same losses and weights from the store's copies.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.drill.killed import anywhere
from benchmarks.drill.lab import Lab, Outcome, Run, Trainer, kill, slow_steps

ROOT = Path(__file__).resolve().parents[2]
COPY_SECONDS = 2  # checkpoint.copy_timeout_seconds
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Server:
    """The store's process.

    Attributes:
        pid: of the process.
        bucket: its only one.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.drill.stores"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self._process.pid
        self.url, self.bucket = self._answer()

    def does(self, what: str, **named: Any) -> None:
        """Call one of the functions of `serve`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, named]) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OSError("the S3 server did not start; it needs moto, which the pinned environment has")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def server(lab: Lab) -> Iterator[Server]:
    """Context with a store, known to this process's children; raises OSError if that is impossible here."""
    started = Server()
    lab.servers.add(started.pid)
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT | {"S3_ENDPOINT_URL": started.url})
    try:
        yield started
    finally:
        os.environ.clear()
        os.environ.update(before)
        lab.servers.discard(started.pid)
        started.close()


def fault(kind: str, method: str) -> Callable[[Server, Run, Trainer, random.Random], str]:
    def strike(store: Server, run: Run, trainer: Trainer, draw: random.Random) -> str:
        requests = 1 + draw.randrange(20)
        store.does("fail", kind=kind, method=method, requests=requests)
        trainer.wait()
        return f"{requests} of {method}: {kind}"

    return strike


def frozen(store: Server, run: Run, trainer: Trainer, draw: random.Random) -> str:
    seconds = 1 + 4 * draw.random()
    kill(store.pid, signal.SIGSTOP)
    time.sleep(seconds)
    kill(store.pid, signal.SIGCONT)
    return f"the store is frozen for {seconds:.1f} s"


def gone(store: Server, run: Run, trainer: Trainer, draw: random.Random) -> str:
    seconds = 4 * draw.random()
    store.does("stop")
    time.sleep(seconds)
    store.does("start")
    return f"no server for {seconds:.1f} s"


def killed(store: Server, run: Run, trainer: Trainer, draw: random.Random) -> str:
    kill(trainer.pid)
    return "kill -9 of the rank that copies"


KINDS = {
    "busy PUT": fault("busy", "PUT"),
    "busy GET": fault("busy", "GET"),
    "hanging PUT": fault("hang", "PUT"),
    "hanging GET": fault("hang", "GET"),
    "dropped GET": fault("drop", "GET"),
    "frozen": frozen,
    "gone": gone,
    "killed": killed,
}


def store_faults(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Make the store fail while the run copies; then remove the run's folder and repeat the command."""
    outcomes = []
    try:
        with server(lab) as store:
            for kind in draw.sample(list(KINDS), number):
                url = f"s3://{store.bucket}/{draw.randrange(1 << 30)}"
                words = (f"checkpoint.copy_to={url}", f"checkpoint.copy_timeout_seconds={COPY_SECONDS}")
                run, strike = lab.run(1, *words), KINDS[kind]
                trainer = run.start(hook=slow_steps)
                when = anywhere(run, trainer, draw)
                what = strike(store, run, trainer, draw)
                ended = trainer.wait()
                asked = "nothing is started from zero" in ended.said  # a start may not guess the store's contents
                codes = (-9,) if strike is killed and ended.code else (0, 74) if asked else (0,)
                problem = ended.wrong(*codes) or lab.wait_until_gone()
                if ended.code == 0:
                    problem = problem or run.differs(lab.reference())
                store.does("heal")
                shutil.rmtree(run.folder, ignore_errors=True)
                problem = problem or run.finish().wrong(0) or run.differs(lab.reference()) or run.left()
                done = f"{what}, {when or 'after the end'}"
                outcomes.append(Outcome(done, "lost" if problem else "survived", problem))
                lab.wait_until_gone()
                lab.remove(run)
    except OSError as error:
        return [*outcomes, Outcome("store", "skipped", str(error))]
    return outcomes


def serve() -> None:
    """Run the store's process: print its address, then execute commands from standard input, a line of JSON each."""
    from modernbert_train.distributed.orphans import die_with
    from tests.support.s3 import BUCKET, Store

    die_with(os.getppid())
    store = Store()

    def fail(kind: str, method: str, requests: int) -> None:
        store.fault, store.faulty_method, store.faults_left = kind, method, requests

    def heal() -> None:
        store.fault, store.faults_left = None, 0

    services: dict[str, Callable[..., None]] = {
        "fail": fail,
        "heal": heal,
        "stop": store.stop,
        "start": lambda: store.start(store.port),
    }
    print(json.dumps([store.url, BUCKET]), flush=True)
    for line in sys.stdin:
        what, named = json.loads(line)
        services[what](**named)
        print("null", flush=True)


if __name__ == "__main__":
    serve()
