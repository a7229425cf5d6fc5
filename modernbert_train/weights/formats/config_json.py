"""The file that says what a folder of weights is, and what is read out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.config.model import MOST_LAYERS, MOST_WIDTH
from modernbert_train.config.objective import Order
from modernbert_train.config.read import shown
from modernbert_train.config.schema import ModelConfig, ObjectiveConfig
from modernbert_train.core.read_json import read_json
from modernbert_train.errors import DataError

CONFIG_JSON = "config.json"
PREDICTS_FROM, BEFORE = "predicts_from", "before"  # a key of ours, and its value where the token before predicts


class Described(NamedTuple):
    """What a config.json says.

    Attributes:
        model: the architecture. What only concerns training is not always in the file, and then has its default.
        max_tokens: longest sequence.
        order: what a token sees; causal is a decoder.
        detects: it was trained to tell replaced tokens.
        objective: of one that tells classes, or of an encoder alone; None: it predicts tokens, or tells replaced ones.
    """

    model: ModelConfig
    max_tokens: int
    order: Order
    detects: bool = False
    objective: ObjectiveConfig | None = None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: the file is missing, cut short or holds something else.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Restore it from a copy.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object. Restore it from a copy.")
    return content


def number_under(
    raw: dict[str, Any], key: str, default: float, where: str, *, least: float | None = None, most: float = MOST_WIDTH
) -> float:
    """The number under a key, whole if the default is.

    Args:
        raw: content of a config.json.
        key: of it; num_hidden_layers has a bound of its own.
        default: where there is none.
        where: how messages name the file.
        least, most: bounds; least None: above 0.

    Raises:
        DataError: it is no such number.
    """
    value = default if raw.get(key) is None else raw[key]
    kinds = (int,) if isinstance(default, int) else (int, float)
    most = MOST_LAYERS if key == "num_hidden_layers" else most
    enough = isinstance(value, kinds) and (value > 0 if least is None else value >= least)
    if isinstance(value, bool) or not enough or value > most:
        bound = "above 0" if least is None else f"from {least:,}"
        whole = "whole number" if kinds == (int,) else "number"
        raise DataError(
            f"{where}: {key}={shown(value)}, not a {whole} {bound} and up to {most:,}. Restore the file from a copy."
        )
    return value
