"""Which encoder a `model` section is, and which model the heads of an objective make of it.

A new architecture is a file beside this one and a row in `ENCODERS`; a new kind of heads is a row in `HEADS`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch

from modernbert_train.config.plugins import Rows
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    DistilBertConfig,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    ObjectiveConfig,
    XLNetConfig,
)
from modernbert_train.models.albert import Albert
from modernbert_train.models.bert import Bert
from modernbert_train.models.classifier import TextClassifier, WordClassifier
from modernbert_train.models.contrastive import ForVectors, ForVectorsAndMasked
from modernbert_train.models.deberta import Deberta
from modernbert_train.models.distilled import BESIDE, Distilled
from modernbert_train.models.encoder import Encoder, OnEncoder
from modernbert_train.models.gemma import Gemma
from modernbert_train.models.llama import Llama
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.models.modernbert import ModernBert
from modernbert_train.models.neobert import NeoBert
from modernbert_train.models.pairs import WithOrder
from modernbert_train.models.questions import Answerer, Chooser
from modernbert_train.models.replaced import ForReplacedAndMasked, ForReplacedTokens
from modernbert_train.models.xlnet import XLNet

ENCODERS: Rows[Callable[[Any, ComputeConfig], Encoder]] = Rows(
    "encoder",
    {
        ModernBertConfig: ModernBert,
        BertConfig: Bert,
        DistilBertConfig: Bert,
        AlbertConfig: Albert,
        XLNetConfig: XLNet,
        DebertaConfig: Deberta,
        LlamaConfig: Llama,
        GemmaConfig: Gemma,
        NeoBertConfig: NeoBert,
    },
)

# by `ObjectiveConfig.heads`, with its `idle_heads` after them
HEADS: dict[tuple[str, ...], type[OnEncoder]] = {
    ("tokens",): ForMaskedLM,
    ("tokens", "pair"): WithOrder,
    **{("tokens", *some): Distilled for n in range(1, 1 + len(BESIDE)) for some in combinations(BESIDE, n)},
    ("generator", "replaced"): ForReplacedTokens,
    ("generator", "replaced", "tokens"): ForReplacedAndMasked,
    ("vectors",): ForVectors,
    ("vectors", "scores"): ForVectors,
    ("vectors", "tokens"): ForVectorsAndMasked,
    ("vectors", "scores", "tokens"): ForVectorsAndMasked,
    ("class",): TextClassifier,
    ("tag",): WordClassifier,
    ("answer",): Answerer,
    ("choice",): Chooser,
}


def build_model(model: ModelConfig, objective: ObjectiveConfig, compute: ComputeConfig | None = None) -> OnEncoder:
    """What a run trains, without its weights.

    Args:
        model: the encoder.
        objective: the heads that stand on it.
        compute: kernels and recomputation; None: the defaults.
    """

    def another(config: ModelConfig) -> Encoder:
        given = compute or ComputeConfig()
        encoder = ENCODERS[type(config)](config, given)
        encoder.compute = given
        return encoder

    return HEADS[objective.heads + objective.idle_heads].build(another(model), objective, another)


def shapes_of(model: ModelConfig, objective: ObjectiveConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, the tied decoder's not repeated; nothing is allocated."""
    with torch.device("meta"):
        built = build_model(model, objective)
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def all_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The same with all heads that there are, each under its own module."""
    with torch.device("meta"):
        encoder = ENCODERS[type(model)](model, ComputeConfig())
        built = [heads.alone(encoder) for heads in HEADS.values()]
    return {name: tuple(parameter.shape) for each in built for name, parameter in each.named_parameters()}
