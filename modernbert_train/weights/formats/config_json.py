"""config.json, the file that describes the weights in a folder, and helpers to read its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modernbert_train.config.model import MAX_LAYERS, MAX_WIDTH
from modernbert_train.config.objective import Order
from modernbert_train.config.read_yaml import shown
from modernbert_train.config.schema import ModelConfig, ObjectiveConfig
from modernbert_train.core.files import os_errors_as
from modernbert_train.core.read_json import read_json
from modernbert_train.errors import DataError

CONFIG_JSON, ADAPTER_JSON = "config.json", "adapter_config.json"  # the second of peft
PREDICTS_FROM, BEFORE = "predicts_from", "before"  # this program's key, and its value if the token before predicts
PAIR_HEAD = "pair_head"  # name of the module `PairHead`
# ModelConfig -> config.json, in most formats
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
# config.json's names of activations -> names here; the first of each is written
ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Described(NamedTuple):
    """Description of a model by its config.json.

    Attributes:
        model: the architecture. Keys that only concern training may be missing in the file, and then have defaults.
        max_tokens: longest sequence.
        order: which tokens each token sees; causal is a decoder.
        detects: True for a replaced-token detector.
        objective: for labelled models and encoders without a head; None: it predicts tokens or detects replaced ones.
    """

    model: ModelConfig
    max_tokens: int
    order: Order
    detects: bool = False
    objective: ObjectiveConfig | None = None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing, cut short or not a JSON object.
    """
    with os_errors_as(DataError, f"{path}: cannot be read", "Restore it from a copy.", ValueError):
        content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object. Restore it from a copy.")
    return content


class Content(dict[str, Any]):
    """The content of a config.json, or an object in it, with the file's name for messages."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        super().__init__(raw)
        self.where = where

    def number(self, key: str, default: float, *, minimum: float | None = None, maximum: float = MAX_WIDTH) -> Any:
        """Return the number under a key; a whole number if the default is one.

        Args:
            key: a number of layers has a lower bound.
            default: value of a missing key.
            minimum, maximum: bounds; minimum None: above 0.

        Raises:
            DataError: the value is not such a number.
        """
        value = default if self.get(key) is None else self[key]
        kinds = (int,) if isinstance(default, int) else (int, float)
        maximum = MAX_LAYERS if key in ("num_hidden_layers", "n_layer", "n_layers") else maximum
        enough = isinstance(value, kinds) and (value > 0 if minimum is None else value >= minimum)
        if isinstance(value, bool) or not enough or value > maximum:
            bound = "above 0" if minimum is None else f"from {minimum:,}"
            whole = "whole number" if kinds == (int,) else "number"
            raise DataError(
                f"{self.where}: {key}={shown(value)}, not a {whole} {bound} and up to {maximum:,}. Restore the file "
                "from a copy."
            )
        return value

    def share(self, key: str, default: float) -> float:
        """Return a dropout rate."""
        return float(self.number(key, default, minimum=0.0, maximum=0.999))

    def word(self, key: str, default: str, choices: Collection[str]) -> str:
        """Return the string under a key.

        Raises:
            DataError: it is not in `known`.
        """
        value = default if self.get(key) is None else self[key]
        if not isinstance(value, str) or value not in choices:
            raise self.unknown(", ".join(choices), key)
        return value

    def unknown(self, choices: object, *keys: str, given: str = "") -> DataError:
        """Return the error for values of keys that the encoder does not implement."""
        values = ", ".join(f"{key}={shown(self.get(key))}" for key in keys)
        return DataError(f"{self.where}: {values}; {given}this encoder only knows {choices}. Name another model.")

    def damaged(self, key: str, problem: str) -> DataError:
        """Return the error for a value that no program would write."""
        return DataError(f"{self.where}: {key}={shown(self.get(key))}, {problem}. Restore the file from a copy.")
