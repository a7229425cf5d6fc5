"""Several workers on one machine: each a process of its own with its share of the GPUs and cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from launch.topology import usable_gpus
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.distributed import follow
from modernbert_train.distributed.gpus import count_gpus
from modernbert_train.errors import ConfigError, RunError, StoppedEarly

SWEEP = Path(__file__).resolve().parents[1] / "sweep.py"
FOLLOW = Path(follow.__file__)


def ranks_of(sweep: SweepConfig, config: RunConfig) -> int:
    """Processes of a trial in this worker."""
    gpus = 0 if config.compute.device == "cpu" else count_gpus()
    return sweep.ranks or config.launch.ranks_per_node or usable_gpus(config.phases, gpus) or 1


def shares(sweep: SweepConfig, environment: Mapping[str, str], gpus: int, cores: int) -> list[dict[str, str]]:
    """The environment of each worker: disjoint GPUs, and cores for its trials' processes.

    Args:
        sweep: the spec, with its workers and ranks.
        environment: of this process.
        gpus: that this process may use.
        cores: of this machine.

    Raises:
        ConfigError: there are fewer GPUs than the trials would use.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")][:gpus] if visible else [str(index) for index in range(gpus)]
    each = gpus // sweep.workers
    if gpus and each < (sweep.ranks or 1):
        raise ConfigError(
            f"workers={sweep.workers} with ranks={sweep.ranks}: {gpus} GPUs are here, and no two processes share one. "
            "Lower workers or ranks."
        )
    threads = max(1, cores // (sweep.workers * (sweep.ranks or each or 1)))
    found = []
    for worker in range(sweep.workers):
        own = dict(environment)
        own.setdefault("OMP_NUM_THREADS", str(threads))
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(names[worker * each : (worker + 1) * each])
        found.append(own)
    return found


def run_many(sweep: SweepConfig, arguments: Sequence[str]) -> None:
    """Run all workers of this machine to the end; signals are passed to them.

    Args:
        sweep: the spec.
        arguments: of launch/sweep.py.

    Raises:
        StoppedEarly: a signal came, and the workers have saved.
        RunError: a worker failed; what it said is above.
    """
    dies = [str(os.getpid()), str(int(signal.SIGTERM))]
    command = [sys.executable, "-S", str(FOLLOW), *dies, sys.executable, str(SWEEP), *arguments, "--worker"]
    environments = shares(sweep, os.environ, count_gpus(), os.cpu_count() or 1)
    stopping = False
    workers: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for worker in workers:
            worker.send_signal(signal.SIGTERM)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        for environment in environments:
            if not stopping:
                workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
        codes = [worker.wait() for worker in workers]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    failed = [code for code in codes if code not in (0, StoppedEarly.exit_code)]
    if failed:
        found = RunError(f"{sweep.name}: a worker ended with exit code {failed[0]}; the same command resumes.")
        found.exit_code = failed[0] if failed[0] > 0 else RunError.exit_code
        raise found
    if stopping or any(codes):
        raise StoppedEarly(f"{sweep.name}: stopped and saved. The same command resumes.")
