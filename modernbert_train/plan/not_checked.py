"""List the checks that `check` leaves to training, since they need a network, a GPU, or all of the data."""

from __future__ import annotations

from pathlib import Path

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.shard_sizes import all_folders, is_in_store
from modernbert_train.distributed.visible_gpus import shown_gpus
from modernbert_train.plan.resolve import first_weights
from modernbert_train.weights.names import NamedModel


def not_checked(config: RunConfig) -> list[str]:
    """Return a line for each check that `check` leaves to training."""
    folders = all_folders(config.data, config.evals)
    local = [each.key for each in folders if not is_in_store(each)]
    lines = [f"{each.key}={each.path}: shards in a store" for each in folders if is_in_store(each)]
    if local:
        lines.append(f"{', '.join(local)}: contents of the shards; hashes are compared when they are read")
    if not RunFolder(config).has_checkpoints():
        lines += [_of_weights(*named) for named in first_weights(config)]
    if config.compute.device == "cuda" and not shown_gpus():
        lines.append("compute.device=cuda: there is no GPU here; kernels, precision and memory where it trains")
    if config.checkpoint.copy_to is not None:
        lines.append(f"checkpoint.copy_to={config.checkpoint.copy_to}: whether the store can be written")
    return lines


def _of_weights(key: str, name: str) -> str:
    if Path(name).exists():
        return f"{key}={name}: whether the weights are complete, and fit"
    if NamedModel("hub", Path(name)).folder is not None:
        return f"{key}={name}: a model of the hub that is in this machine's cache; whether it is whole, and fits"
    return (
        f"{key}={name}: a model of the hub that is not in this machine's cache; whether the hub gives it, and it fits"
    )
