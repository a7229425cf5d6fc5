"""A model named by a person as a folder here: one that is there already, or one that the Hugging Face hub has."""

from __future__ import annotations

import re
from pathlib import Path

from modernbert_train.core.files import anything_as
from modernbert_train.errors import DataError
from modernbert_train.weights.formats.config_json import CONFIG_JSON

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_name(name: str) -> None:
    """Whether it can be a model; the hub is not asked.

    Raises:
        DataError: it is neither a folder nor of the form owner/model.
    """
    if not Path(name).is_dir() and not _HUB_ID.fullmatch(name):
        raise DataError(
            f"{name}: no such folder, and not the owner/model of a hub. Name a folder with a {CONFIG_JSON}."
        )


def is_cached(name: str) -> bool:
    """Whether this machine has fetched a model of the hub before; the hub is not asked."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, CONFIG_JSON), str)


def local_model(name: str) -> Path:
    """The folder of a model; a folder of that name wins over the hub, and what was fetched once needs no network.

    Args:
        name: a folder, or `owner/model` on the hub.

    Raises:
        DataError: neither is to be had.
    """
    check_name(name)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    from modernbert_train.weights.hf_folder import EXPORTED_FILES, INDEX

    remedy = "Name a folder, or fetch the model where there is a network."
    with anything_as(DataError, f"{name}: no such folder here, and the hub does not give it", remedy):
        return Path(snapshot_download(name, allow_patterns=[*sorted(EXPORTED_FILES), INDEX, "model-*.safetensors"]))
