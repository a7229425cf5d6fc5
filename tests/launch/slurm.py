"""A Slurm of one machine, from separate daemons in a folder; needs slurmctld, slurmd, munged and root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/backfill
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
KillWait=5
InactiveLimit=0
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return the reason why Slurm is impossible here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} here (Debian packages slurmctld, slurmd, slurm-client, munge)"
    return None if os.geteuid() == 0 else "slurmd starts jobs as root only"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Run it; yield the environment in which sbatch and the others find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(host=socket.gethostname().split(".")[0], folder=folder, control=_free_port(), node=_free_port())
    )
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    commands = [munge, ["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf)]]
    environment = os.environ | {"SLURM_CONF": str(conf)}
    daemons = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as output:
                daemons.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            if command is munge:
                _wait(lambda: (folder / "munge.socket").exists())
        _wait(lambda: "idle" in _output(["sinfo", "-h", "-o", "%t"], environment))
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _output(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout


def _wait(done: object, seconds: float = 60) -> None:
    assert callable(done)
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "Slurm did not start"
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
