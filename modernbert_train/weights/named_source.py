"""Whether a name can be that of weights to start from, as far as it can be told without reading them; without torch."""

from __future__ import annotations

from pathlib import Path

from modernbert_train.errors import DataError, StorageError
from modernbert_train.run.manifest import CONFIG_YAML, MANIFEST
from modernbert_train.weights.formats import read_folder
from modernbert_train.weights.formats.config_json import CONFIG_JSON
from modernbert_train.weights.hub import check_name


def check_named(name: str | Path, runs_folder: str | None = None) -> None:
    """Refuse what can be seen to be nothing to start from.

    Args:
        name: see `open_source`.
        runs_folder: where the runs are: what is missing there is not asked of a hub, though its name would fit.

    Raises:
        DataError: there is no such model, or its config.json is damaged or of another architecture.
        StorageError: a run without a checkpoint.
    """
    folder = Path(name)
    if (folder / MANIFEST).is_file():
        return
    if (folder / CONFIG_YAML).is_file():
        if not any((folder / "checkpoints").glob("step-*")):
            raise StorageError(f"{folder}: a run without a checkpoint. Train it first, or name another.")
        return
    if folder.suffix == ".safetensors":
        raise DataError(f"{folder}: weights alone. Name the folder that holds them and their {CONFIG_JSON}.")
    if folder.suffix == ".pt" and not folder.is_file():
        raise DataError(f"{folder}: no such file. Name a checkpoint of Composer, such as ep0-ba4000-rank0.pt.")
    if folder.is_file():
        return
    if (
        runs_folder is not None
        and not folder.exists()
        and folder.parent == Path(runs_folder)
        and folder.parent.is_dir()
    ):
        raise DataError(f"{folder}: no such run. Name one of those in {runs_folder}, or another model.")
    check_name(str(name))
    if folder.is_dir():
        read_folder(folder)
