"""Count processes and machines, and choose where they meet: one pure function.

The command line wins over a scheduler's environment (Slurm's, then torchrun's), that over the YAML's `launch:`
section, and that over what the machine has. Without any of them one machine starts a process per GPU, on as many of its
GPUs as can share every global batch evenly.
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
    """Processes of a run as one machine sees them.

    Attributes:
        nodes: machines.
        ranks_per_node: processes on each.
        node_rank: number of this machine; 0 is where the others come to. None: whoever has the endpoint's name.
        endpoint: HOST:PORT where several machines meet.
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
    """Whether torchrun or Composer's launcher has already made this process one of its ranks."""
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
    """Decide.

    Args:
        launch: the YAML's section.
        environment: of this process.
        gpus: that this machine has for the run.
        usable: of them, where it is the only machine and nobody said how many; None: all. See `usable_gpus`.
        nodes, ranks, node_rank, rendezvous: from the command line; ranks are those of one machine.

    Raises:
        ConfigError: several machines without a place to meet, or a scheduler that starts this in another way than once
            on each machine.
    """
    there = _from_slurm(environment, told=nodes) or _from_torchrun(environment)
    told = ranks or there.get("ranks_per_node") or launch.ranks_per_node
    found = Topology(
        nodes=nodes or there.get("nodes") or launch.nodes,
        ranks_per_node=told or gpus or 1,
        node_rank=there.get("node_rank") if node_rank is None else node_rank,
        endpoint=rendezvous or launch.rendezvous or _endpoint(environment),
    )
    if found.nodes == 1:
        if told or not usable:
            return Topology(1, found.ranks_per_node)
        return Topology(1, usable, idle_gpus=gpus - usable)
    if found.endpoint is None or split_endpoint(found.endpoint) is None:
        raise ConfigError(
            f"{found.nodes} machines and rendezvous={found.endpoint}: where do they meet? Start this on each of them "
            "with --rendezvous HOST:PORT, HOST being one of them; or write a job file with --on; or use --nodes 1."
        )
    if found.node_rank is not None and not 0 <= found.node_rank < found.nodes:
        raise ConfigError(f"--node-rank={found.node_rank}: {found.nodes} machines are numbered 0 to {found.nodes - 1}.")
    return found


def usable_gpus(phases: Mapping[str, PhaseConfig], gpus: int) -> int:
    """The most of so many GPUs that can share every global batch of a run evenly; 0 where there are none."""
    return next((number for number in range(gpus, 0, -1) if not uneven_phases(phases, number)), 0)


def uneven_phases(phases: Mapping[str, PhaseConfig], ranks: int) -> list[str]:
    """Names of the phases with a global batch that so many ranks cannot share evenly."""
    return [name for name, phase in phases.items() if any(rows % ranks for rows in phase.batch_sizes)]


def is_even(phases: Mapping[str, PhaseConfig], nodes: int, topology: Topology) -> bool:
    """Whether so many machines like this one can share every global batch evenly."""
    return not uneven_phases(phases, nodes * topology.ranks_per_node)


def with_fewer_machines(phases: Mapping[str, PhaseConfig], topology: Topology, environment: Mapping[str, str]) -> str:
    """What to type if a machine stays away; empty where fewer cannot share the batches."""
    fewer = next((n for n in range(topology.nodes - 1, 0, -1) if is_even(phases, n, topology)), None)
    if fewer is None:
        return ""
    again = f"the same command with --nodes {fewer}"
    if "SLURM_JOB_ID" in environment:
        again = f"the run rendered anew with --on slurm --nodes {fewer}"
    return (
        f"launch: if a machine stays away, {again} continues this run on {fewer * topology.ranks_per_node} ranks, "
        "which can share every global batch evenly."
    )


def _from_slurm(environment: Mapping[str, str], told: int | None) -> dict[str, int]:
    if "SLURM_JOB_ID" not in environment:
        return {}
    in_step = "SLURM_STEP_NUM_NODES" in environment
    if not in_step:
        nodes = int(environment.get("SLURM_NNODES", "1"))
        if nodes > 1 and told is None:
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
    """What `torchrun` reads from its environment too, so that operators which set it work unchanged."""
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
    """How long the run may go on until it has to save, because its time ends; None without a limit.

    Args:
        launch: the YAML's section; its limit counts where Slurm does not tell the job's end.
        environment: of this process.
        now: seconds since 1970.

    Raises:
        ConfigError: that is at once, and would be at each new start.
    """
    if "SLURM_JOB_END_TIME" in environment:
        left = int(environment["SLURM_JOB_END_TIME"]) - now
    elif launch.time_limit_minutes is not None:
        left = 60.0 * launch.time_limit_minutes
    else:
        return None
    if left <= launch.save_seconds:
        raise ConfigError(
            f"launch.save_seconds={launch.save_seconds}: the job ends in {left:.0f} s, so it would save before it has "
            "trained. Ask for more time, or lower it."
        )
    return left - launch.save_seconds


def first_host(nodelist: str) -> str:
    """The first machine of Slurm's short form: gpu[003-010,12] is gpu003."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist


def slurm_port(job: str) -> int:
    """A port that two jobs on one machine will hardly share, below those that Linux gives to outgoing connections."""
    return 10_000 + int(job) % 20_000
