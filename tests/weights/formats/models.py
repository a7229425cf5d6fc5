"""Small models of every kind with weights that are all different, written as exports; for tests of formats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import MaskedLmConfig, ModelConfig, ObjectiveConfig, SentenceOrderConfig
from modernbert_train.models.build import build_model
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import export_format
from modernbert_train.weights.formats.tensors import to_hf
from tests.support.encoders import (
    ALBERT,
    BERT,
    DEBERTA,
    DEBERTA_NARROW,
    DEBERTA_V1,
    ROBERTA,
    VOCABULARY,
    XLNET,
    fill,
)  # fmt: skip

LONGEST = 40
TOKENS = ("model", "head", "decoder")

# architectures that a config.json can describe
SAID: dict[str, ModelConfig] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "albert": ALBERT,
    "albert, groups and turns": replace(ALBERT, groups=2, group_layers=2),
    "albert, none": replace(ALBERT, sharing="none"),
    "xlnet": XLNET,
    "deberta": DEBERTA,
    "deberta v1": DEBERTA_V1,
    "deberta, narrow": DEBERTA_NARROW,
}
# properties that only the weights show, with the config.json
UNSAID: dict[str, ModelConfig] = {
    "albert, attention": replace(ALBERT, sharing="attention"),
    "albert, ffn": replace(ALBERT, sharing="ffn"),
}
# values of a wrong type or beyond any range, for every key of a config.json
WEIRD: list[Any] = [
    None, True, False, 0, -1, 5, 10**30, math.inf, math.nan, "", "x", [], [1], [None], {}, {"a": 1},
    {"full_attention": 3}, {"full_attention": {"rope_theta": "x"}}, {"full_attention": {"rope_type": []}}, [["full"]],
]  # fmt: skip


def weights_of(config: ModelConfig, objective: ObjectiveConfig | None = None) -> dict[str, Tensor]:
    model = build_model(config, objective or MaskedLmConfig())
    fill(model, config)
    return model.state_dict()  # type: ignore[no-any-return]


def weights_with_pairs(config: ModelConfig) -> dict[str, Tensor]:
    return weights_of(config, SentenceOrderConfig())


def describe(
    config: ModelConfig, order: Order = "all", modules: tuple[str, ...] = TOKENS, vocabulary: Vocabulary = VOCABULARY
) -> dict[str, Any]:
    return export_format(config, order, modules).describe(config, order, modules, LONGEST, vocabulary)


def stored(config: ModelConfig, weights: dict[str, Tensor], order: Order = "all") -> dict[str, Tensor]:
    return to_hf(export_format(config, order), weights, config)


def write(folder: Path, config: ModelConfig, weights: dict[str, Tensor], order: Order = "all") -> Path:
    """Write the tensors and config.json, as an export."""
    folder.mkdir()
    modules = tuple({name.partition(".")[0] for name in weights})
    save_file(stored(config, weights, order), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(describe(config, order, modules)))
    return folder


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
