"""Trials at a time on one machine: each with its share of the GPUs and cores."""

from __future__ import annotations

from collections.abc import Mapping

from launch.topology import usable_gpus
from modernbert_train.config.schema import RunConfig
from modernbert_train.config.tools.sweep import SweepConfig
from modernbert_train.distributed.many import environments
from modernbert_train.errors import ConfigError

# names by which launch/run.py would take a trial for a part of the job that the sweep runs in
_OF_THE_JOB = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ranks_of(sweep: SweepConfig, config: RunConfig, gpus: int) -> int:
    """Processes of a trial that has so many GPUs."""
    usable = usable_gpus(config.phases, 0 if config.compute.device == "cpu" else gpus)
    return sweep.ranks or config.launch.ranks_per_node or usable or 1


def shares(
    sweep: SweepConfig, workers: int, environment: Mapping[str, str], gpus: int, cores: int
) -> list[dict[str, str]]:
    """The environment of each trial at a time: disjoint GPUs, and cores for its processes; one alone has them all.

    Args:
        sweep: the spec, with its ranks.
        workers: trials at a time.
        environment: of this process.
        gpus: that this process may use.
        cores: of this machine.

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
