"""A config.json as the `model` section of a run, and the weights beside it as its first ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from modernbert_train.config.schema import AlbertConfig, ModelConfig
from modernbert_train.config.tools.import_config import as_yaml
from modernbert_train.errors import DataError
from modernbert_train.weights.formats import read
from modernbert_train.weights.formats.config_json import read_object
from modernbert_train.weights.hf_folder import INDEX, WEIGHTS, load_weights

# what the weights were trained to see -> the objective that goes on so
ORDERS = {"all": "mlm", "causal": "causal", "given": "permutation"}


def import_model(file: Path) -> tuple[str, list[str]]:
    """Translate the config.json of a model.

    Returns:
        Our YAML, and notes about what it cannot know.

    Raises:
        DataError: the file is damaged or describes a model that is none of ours.
    """
    said = read(read_object(file), str(file))
    has_weights = any((file.parent / name).exists() for name in (WEIGHTS, INDEX))
    model = _shared(said.model, file.parent) if has_weights else said.model
    objective = "rtd" if said.detects else ORDERS[said.order]
    ours: dict[str, Any] = {"model": asdict(model), "objective": {"name": objective}}
    notes = [
        "data, phases, optim: not said by a model; take them from a file in yamls/",
        "model: what concerns training alone, such as dropout of attention probabilities, has the defaults of here",
    ]
    if said.detects:
        notes.append("objective: a discriminator does not say what its generator was; generator_... have the defaults")
    if has_weights:
        ours["weights"] = {"init_from": str(file.parent)}
    else:
        notes.append(f"weights.init_from: no {WEIGHTS} beside the file")
    return as_yaml(ours), notes


def _shared(model: ModelConfig, folder: Path) -> ModelConfig:
    """With what layers have in common by their weights, where config.json has no word for it."""
    if model.name != "albert" or (albert := cast(AlbertConfig, model)).sharing != "none":
        return model
    for found in (replace(albert, sharing="attention"), replace(albert, sharing="ffn")):
        try:
            load_weights(folder, found)
        except DataError:
            continue
        return found
    return model
