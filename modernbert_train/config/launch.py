"""Placement of a run's processes: read only by `launch` and not in training, so it may change between starts.

The command line and a scheduler's environment take precedence; see docs/clusters.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from modernbert_train.config.knob import knob


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Machines of the run, and the requests of a job file to the scheduler; see docs/clusters.md."""

    nodes: int = knob(1, above=0, high=1 << 20)  # machines
    # processes on each; None: one per GPU, on one machine at most as many as divide every batch evenly; without GPUs
    # one. A job file needs the number
    ranks_per_node: int | None = knob(None, above=0, high=1 << 10)
    rendezvous: str | None = None  # HOST:PORT of the first machine, where the others connect
    rendezvous_seconds: float = knob(600.0, above=0)  # timeout for machines that do not connect, which ends the start
    # the run saves and ends this long before the time limit; longer than a step and a save
    save_seconds: int = knob(120, low=1, why="since a step and a checkpoint take time")
    time_limit_minutes: int | None = knob(
        None, above=0
    )  # of one job, which then ends with code 75; the next one resumes
    # restarts after failures, where the scheduler counts them; after code 75 it always restarts
    retries: int = knob(3, low=0)
    # cores that a job file requests per rank: for the rank, its data workers and torch's threads
    cpus_per_rank: int = knob(8, above=0)
    memory_gib: int | None = knob(None, above=0)  # of one machine; None: the scheduler's default
    gpu: str | None = None  # kind of GPU in the scheduler's terms; on kubernetes h100, say, or the node's label
    image: str | None = None  # container with this project, see Dockerfile; docker and kubernetes need it
    partition: str | None = None  # slurm
    account: str | None = None  # slurm
    sbatch: list[str] = field(default_factory=list)  # slurm: more options of sbatch, such as --qos=high; they win
    container: str | None = None  # slurm: image for Apptainer to run this program in, a .sif file or docker://...
    namespace: str | None = None  # kubernetes
    volume_claim: str | None = None  # kubernetes: a disk that all machines share, mounted as /work
    rdma_resource: str | None = None  # kubernetes: the cluster's resource of InfiniBand or RoCE devices, or NAME=COUNT
    setup: str | None = None  # shell commands before the start on each machine: modules, a virtual environment
    env: dict[str, str] = field(default_factory=dict)  # environment of the ranks; no secrets, it is saved with the run


def launch_mistakes(launch: LaunchConfig) -> Iterator[str]:
    """Yield a message for each invalid value."""
    limit = launch.time_limit_minutes
    if limit is not None and 0 < 60 * limit <= launch.save_seconds:
        yield (
            f"launch.save_seconds={launch.save_seconds} leaves no time of launch.time_limit_minutes={limit}. Lower it, "
            "or raise the limit."
        )
    if launch.rendezvous is not None and split_endpoint(launch.rendezvous) is None:
        yield f"launch.rendezvous={launch.rendezvous!r}: HOST:PORT is expected, for example node-1:29500."
    for option in launch.sbatch:
        if not re.fullmatch(r"--?[A-Za-z][^\n\r]*", option):
            yield f"launch.sbatch: {option!r} is not an option of sbatch. Write it as on its command line: --qos=high."
    if launch.rdma_resource is not None and split_resource(launch.rdma_resource) is None:
        yield (
            f"launch.rdma_resource={launch.rdma_resource!r}: DOMAIN/NAME or DOMAIN/NAME=COUNT is expected, for example "
            "rdma/hca_shared_devices_a; `kubectl describe node` lists it under Allocatable."
        )
    for name in launch.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"launch.env.{name}: not a name of an environment variable. Use letters, digits and '_'."


def split_endpoint(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT into its parts; None if the text is anything else. IPv6 addresses are in brackets."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        return None
    return match[1] or match[2], int(match[3])


def split_resource(text: str) -> tuple[str, int] | None:
    """Return a Kubernetes resource and its number per machine, from DOMAIN/NAME or DOMAIN/NAME=COUNT."""
    match = re.fullmatch(
        r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)(?:=(\d{1,4}))?", text
    )
    if match is None or match[4] == "0":
        return None
    return match[1], int(match[4] or 1)
