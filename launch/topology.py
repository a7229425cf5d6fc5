"""Count processes and machines, and choose where they meet: one pure function.

The command line overrides a scheduler's environment (Slurm's, then torchrun's), which overrides the YAML's `launch:`
section, which overrides the machine's defaults. By default one machine starts a process per GPU, on as many of its GPUs
as can share every global batch evenly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from modernbert_train.config.launch import LaunchConfig, split_endpoint
from modernbert_train.config.schema import PhaseConfig
from modernbert_train.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Processes of a run, and the number of this machine.

    Attributes:
        nodes: machines.
        ranks_per_node: processes on each.
        node_rank: number of this machine; 0 holds the rendezvous. None: the machine with the endpoint's name holds it.
        endpoint: HOST:PORT of the rendezvous of several machines.
        idle_gpus: GPUs of a single machine that are left out, because the global batches cannot be shared by all.
    """

    nodes: int
    ranks_per_node: int
    node_rank: int | None = None
    endpoint: str | None = None
    idle_gpus: int = 0

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def is_rank(environment: Mapping[str, str]) -> bool:
    """True if torchrun or Composer's launcher has started this process as one of its ranks."""
    return all(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def find_topology(
    launch: LaunchConfig,
    environment: Mapping[str, str],
    *,
    gpus: int,
    usable: int | None = None,
    nodes: int | None = None,
    ranks: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
) -> Topology:
    """Return the topology of a start.

    Args:
        launch: the YAML's section.
        environment: of this process.
        gpus: of this machine for the run.
        usable: default number of GPUs of a single machine; None: all. See `usable_gpus`.
        nodes, ranks, node_rank, rendezvous: from the command line; `ranks` counts per machine.

    Raises:
        ConfigError: several machines without a rendezvous, or a scheduler that starts this in another way than once
            on each machine.
    """
    outer = _from_slurm(environment, nodes) or _from_torchrun(environment)
    requested = ranks or outer.get("ranks_per_node") or launch.ranks_per_node
    topology = Topology(
        nodes=nodes or outer.get("nodes") or launch.nodes,
        ranks_per_node=requested or gpus or 1,
        node_rank=outer.get("node_rank") if node_rank is None else node_rank,
        endpoint=rendezvous or launch.rendezvous or _endpoint(environment),
    )
    if topology.nodes == 1:
        if requested or not usable:
            return Topology(1, topology.ranks_per_node)
        return Topology(1, usable, idle_gpus=gpus - usable)
    if topology.endpoint is None or split_endpoint(topology.endpoint) is None:
        raise ConfigError(
            f"{topology.nodes} machines and rendezvous={topology.endpoint}: no address at which they meet. Start this "
            "on each of them with --rendezvous HOST:PORT, HOST being one of them; or write a job file with --on; or "
            "use --nodes 1."
        )
    if topology.node_rank is not None and not 0 <= topology.node_rank < topology.nodes:
        raise ConfigError(
            f"--node-rank={topology.node_rank}: {topology.nodes} machines are numbered 0 to {topology.nodes - 1}."
        )
    return topology


def usable_gpus(phases: Mapping[str, PhaseConfig], gpus: int, ranks_each: int = 1) -> int:
    """Return the largest number of GPUs that can share every global batch of a run evenly; 0 without GPUs."""
    return next((number for number in range(gpus, 0, -1) if not uneven_phases(phases, number * ranks_each)), 0)


def uneven_phases(phases: Mapping[str, PhaseConfig], ranks: int) -> list[str]:
    """Return the names of the phases with a global batch that so many ranks cannot share evenly."""
    return [name for name, phase in phases.items() if any(rows % ranks for rows in phase.batch_sizes)]


def with_fewer_machines(phases: Mapping[str, PhaseConfig], topology: Topology, environment: Mapping[str, str]) -> str:
    """Return the command for fewer machines if one stays away; empty if fewer cannot share the batches."""
    fewer = usable_gpus(phases, topology.nodes - 1, topology.ranks_per_node)
    if not fewer:
        return ""
    again = f"the same command with --nodes {fewer}"
    if "SLURM_JOB_ID" in environment:
        again = f"the run rendered again with --on slurm --nodes {fewer}"
    return (
        f"launch: if a machine stays away, {again} continues this run on {fewer * topology.ranks_per_node} ranks, "
        "which can share every global batch evenly."
    )


def _from_slurm(environment: Mapping[str, str], nodes_given: int | None) -> dict[str, int]:
    if "SLURM_JOB_ID" not in environment:
        return {}
    in_step = "SLURM_STEP_NUM_NODES" in environment
    if not in_step:
        nodes = int(environment.get("SLURM_NNODES", "1"))
        if nodes > 1 and nodes_given is None:
            raise ConfigError(
                f"SLURM_NNODES={nodes}, and this process was not started by srun, so it is on one of them only. Use "
                "srun --ntasks-per-node=1 python -m modernbert_train launch ...; or --nodes 1 for this machine alone."
            )
        return {}
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", nodes))
    if tasks != nodes:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={tasks} on {nodes} machines: the launcher runs once on each and starts the ranks "
            "itself. Use srun --ntasks-per-node=1."
        )
    return {"nodes": nodes, "node_rank": int(environment.get("SLURM_NODEID", "0"))}


def _from_torchrun(environment: Mapping[str, str]) -> dict[str, int]:
    """Read the variables that `torchrun` reads too, so that operators which set them work unchanged."""
    names = {"nodes": "PET_NNODES", "ranks_per_node": "PET_NPROC_PER_NODE", "node_rank": "PET_NODE_RANK"}
    return {key: int(environment[name]) for key, name in names.items() if environment.get(name, "").isdecimal()}


def _endpoint(environment: Mapping[str, str]) -> str | None:
    if "SLURM_STEP_NODELIST" in environment:
        return f"{first_host(environment['SLURM_STEP_NODELIST'])}:{slurm_port(environment['SLURM_JOB_ID'])}"
    if "PET_RDZV_ENDPOINT" in environment:
        return environment["PET_RDZV_ENDPOINT"]
    address, port = (environment.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return f"{address}:{port}" if address and port else None


def seconds_until_stop(launch: LaunchConfig, environment: Mapping[str, str], now: float) -> float | None:
    """Return the seconds until the run has to save, because its time ends; None without a limit.

    Args:
        launch: the YAML's section; its limit counts if Slurm does not set the job's end.
        environment: of this process.
        now: seconds since 1970.

    Raises:
        ConfigError: the job ends too soon to train at all, and so would each new start.
    """
    if "SLURM_JOB_END_TIME" in environment:
        seconds_left = int(environment["SLURM_JOB_END_TIME"]) - now
    elif launch.time_limit_minutes is not None:
        seconds_left = 60.0 * launch.time_limit_minutes
    else:
        return None
    if seconds_left <= launch.save_seconds:
        raise ConfigError(
            f"launch.save_seconds={launch.save_seconds}: the job ends in {seconds_left:.0f} s, so it would save "
            "before it has trained. Ask for more time, or lower it."
        )
    return seconds_left - launch.save_seconds


def first_host(nodelist: str) -> str:
    """Return the first machine of Slurm's short form: gpu003 for gpu[003-010,12]."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    return "".join(part or "" for part in match.groups()) if match else nodelist


def slurm_port(job: str) -> int:
    """Return a port that two jobs on one machine rarely share, below Linux's range for outgoing connections."""
    return 10_000 + int(job) % 20_000
