"""Small models of every kind with weights that are all different, written as exports; for tests of formats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from modernbert_train.config.objective import Order
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DebertaConfig,
    MaskedLmConfig,
    ModelConfig,
    ObjectiveConfig,
    SentenceOrderConfig,
    XLNetConfig,
)
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.vocabulary import Vocabulary
from modernbert_train.weights.formats import export_format
from modernbert_train.weights.formats.tensors import to_hf

VOCABULARY = Vocabulary(64, cls_id=2, sep_id=3, pad_id=1, mask_id=4, ordinary=np.arange(5, 64), sha256="")
LONGEST = 40
TOKENS, PAIRS = ("model", "head", "decoder"), ("model", "head", "decoder", "pair_head")

BERT = BertConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, max_positions=40, init_std=0.1
)
ROBERTA = replace(BERT, segments=1, position_offset=2, norm_eps=1e-5, dropout=0.2)
ALBERT = AlbertConfig(
    vocab_size=64, embedding_size=16, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48,
    max_positions=40, init_std=0.1,
)  # fmt: skip
XLNET = XLNetConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, init_std=0.1, dropout=0.2
)
DEBERTA = DebertaConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, max_positions=40, buckets=8,
    max_distance=16, dropout=0.2,
)  # fmt: skip

# architectures that a config.json can describe
SAID: dict[str, ModelConfig] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "albert": ALBERT,
    "albert, groups and turns": replace(ALBERT, groups=2, group_layers=2),
    "albert, none": replace(ALBERT, sharing="none"),
    "xlnet": XLNET,
    "deberta": DEBERTA,
    "deberta v1": replace(DEBERTA, version="v1", buckets=16),
    "deberta, narrow": replace(DEBERTA, embedding_size=16, activation="gelu_tanh", convolution=3),
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


def randomized(model: Any) -> Any:
    """Return the model with random weights, all different, biases too."""
    initialize(model, model.config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def weights_of(config: ModelConfig, objective: ObjectiveConfig | None = None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = randomized(build_model(config, objective or MaskedLmConfig())).state_dict()
    return found


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
