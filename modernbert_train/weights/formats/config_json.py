"""The file that says what a folder of weights is, and what is read out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import LabelledConfig, ModelConfig
from modernbert_train.errors import DataError
from modernbert_train.read_json import read_json

CONFIG_JSON = "config.json"


class Described(NamedTuple):
    """What a config.json says.

    Attributes:
        model: the architecture. What only concerns training is not always in the file, and then has its default.
        max_tokens: longest sequence.
        order: what a token sees; causal is a decoder.
        objective: of one that tells classes; None: it predicts tokens, or tells replaced ones.
    """

    model: ModelConfig
    max_tokens: int
    order: Order
    objective: LabelledConfig | None = None


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
