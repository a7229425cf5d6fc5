"""Assign GPUs and cores of a machine to trials that run at the same time."""

from __future__ import annotations

from collections.abc import Mapping

from launch.topology import usable_gpus
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.distributed.run_jobs import environments
from modernbert_train.errors import ConfigError

# variables that would make launch/run.py take a trial for a part of the sweep's job
_OF_THE_JOB = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ranks_of(sweep: SweepConfig, config: RunConfig, gpus: int) -> int:
    """Return the number of processes of a trial with this many GPUs."""
    usable = usable_gpus(config.phases, 0 if config.compute.device == "cpu" else gpus)
    return sweep.ranks or config.launch.ranks_per_node or usable or 1


def shares(
    sweep: SweepConfig, workers: int, environment: Mapping[str, str], gpus: int, cores: int
) -> list[dict[str, str]]:
    """Return the environment of each parallel trial: disjoint GPUs, and cores for its processes; a single one gets all.

    Args:
        sweep: the spec, with its ranks.
        workers: number of parallel trials.
        environment: this process's environment.
        gpus: GPUs that this process may use.
        cores: cores of this machine.

    Raises:
        ConfigError: there are fewer GPUs than the trials would use.
    """
    own = {name: value for name, value in environment.items() if name not in _OF_THE_JOB}
    if workers == 1:
        return [own]
    ranks = sweep.ranks or gpus // workers or 1
    if gpus and workers * ranks > gpus:
        raise ConfigError(
            f"workers={workers} with ranks={sweep.ranks}: {gpus} GPUs are here, and no two processes share one. "
            "Lower workers or ranks."
        )
    return environments(workers, own, gpus, cores, ranks)
