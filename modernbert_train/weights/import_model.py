"""Translate a config.json to the `model` section of a run, with the weights of its folder as the first weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from modernbert_train.config.schema import AlbertConfig, ModelConfig
from modernbert_train.config.tools.import_config import as_yaml
from modernbert_train.errors import DataError
from modernbert_train.models.init import module_of
from modernbert_train.weights.formats import read, read_folder
from modernbert_train.weights.formats.config_json import CONFIG_JSON, read_object
from modernbert_train.weights.formats.electra import TOKEN_HEAD
from modernbert_train.weights.hf_folder import INDEX, WEIGHTS, load_weights

# which tokens each token saw in training -> the objective that continues it
ORDERS = {"all": "mlm", "causal": "causal", "given": "permutation"}


def import_model(file: Path) -> tuple[str, list[str]]:
    """Translate the config.json of a model.

    Args:
        file: the config.json, or its folder.

    Returns:
        YAML of this program, and notes on everything that a config.json does not contain.

    Raises:
        DataError: the file is damaged or describes a model that this program does not have.
    """
    file = file / CONFIG_JSON if file.is_dir() else file
    described = read_folder(file.parent) if file.name == CONFIG_JSON else read(read_object(file), str(file))
    has_weights = any((file.parent / name).exists() for name in (WEIGHTS, INDEX))
    model = _shared(described.model, file.parent) if has_weights else described.model
    detects = described.detects or (has_weights and _detects(model, file.parent))
    objective = "rtd" if detects else ORDERS[described.order]
    ours: dict[str, Any] = {"model": asdict(model), "objective": {"name": objective}}
    notes = [
        "data, phases, optim: not in a config.json; take them from a run that `init run NAME` prints",
        "model: keys that only concern training, such as dropout of attention probabilities, have the defaults",
    ]
    if detects:
        notes.append("objective: config.json does not describe the generator; generator_... have the defaults")
    if has_weights:
        ours["weights"] = {"init_from": str(file.parent)}
    else:
        notes.append(f"weights.init_from: the folder lacks {WEIGHTS}")
    return as_yaml(ours), notes


def _detects(model: ModelConfig, folder: Path) -> bool:
    """Return True if the weights are a DeBERTa's with a head for replaced tokens, which config.json does not name."""
    with suppress(DataError):
        return model.name == "deberta" and TOKEN_HEAD in {module_of(name) for name in load_weights(folder)}
    return False


def _shared(model: ModelConfig, folder: Path) -> ModelConfig:
    """Return an ALBERT with `sharing` found from its weights, since config.json lacks a key for it."""
    if model.name != "albert" or (albert := cast(AlbertConfig, model)).sharing != "none":
        return model
    for config in (replace(albert, sharing="attention"), replace(albert, sharing="ffn")):
        try:
            load_weights(folder, config)
        except DataError:
            continue
        return config
    return model
