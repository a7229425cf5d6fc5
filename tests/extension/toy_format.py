"""A folder for the toy encoder: a minimal format of weights."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats.config_json import Described
from tests.extension.toy_encoder import BagConfig


def read(raw: dict[str, Any], where: str) -> Described:
    return Described(BagConfig(**raw["bag"]), raw["max_tokens"], "all")


def describe(
    config: BagConfig, order: str, modules: Collection[str], max_tokens: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    about = {"architectures": ["Bag"], "model_type": "bag", "exported_by": "a toy"}
    return about | {"bag": asdict(config), "max_tokens": max_tokens}


def theirs(name: str, config: BagConfig) -> tuple[str, ...]:
    return (f"bag.{name}",)


def today(name: str) -> str | None:
    return name
