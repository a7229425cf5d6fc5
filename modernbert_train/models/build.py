"""Build the encoder of a `model` section and the model for an objective's heads.

A new architecture is a file in this folder and a row in `ENCODERS`; a new kind of heads is a row in `HEADS`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch

from modernbert_train.config.distill import TEACHER_TERMS
from modernbert_train.config.plugins import Rows
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    DistilBertConfig,
    EsmConfig,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    ObjectiveConfig,
    XLNetConfig,
)
from modernbert_train.models.encoder import Encoder, OnEncoder

ENCODERS: Rows[type[ModelConfig], Callable[[Any, ComputeConfig], Encoder]] = Rows(
    "encoder",
    {
        ModernBertConfig: "modernbert_train.models.modernbert:ModernBert",
        BertConfig: "modernbert_train.models.bert:Bert",
        DistilBertConfig: "modernbert_train.models.bert:Bert",
        AlbertConfig: "modernbert_train.models.albert:Albert",
        XLNetConfig: "modernbert_train.models.xlnet:XLNet",
        DebertaConfig: "modernbert_train.models.deberta:Deberta",
        LlamaConfig: "modernbert_train.models.llama:Llama",
        GemmaConfig: "modernbert_train.models.gemma:Gemma",
        NeoBertConfig: "modernbert_train.models.neobert:NeoBert",
        EsmConfig: "modernbert_train.models.esm:Esm",
    },
)

# keys: `ObjectiveConfig.heads` followed by its `idle_heads`
HEADS: Rows[tuple[str, ...], type[OnEncoder]] = Rows(
    "heads",
    {
        ("tokens",): "modernbert_train.models.masked_lm:ForMaskedLM",
        ("tokens", "pair"): "modernbert_train.models.sop:WithOrder",
        **{
            ("tokens", *some): "modernbert_train.models.distilled:Distilled"
            for n in range(1, 1 + len(TEACHER_TERMS))
            for some in combinations(TEACHER_TERMS, n)
        },
        ("generator", "replaced"): "modernbert_train.models.replaced:ForReplacedTokens",
        ("generator", "replaced", "tokens"): "modernbert_train.models.replaced:ForReplacedAndMasked",
        ("vectors",): "modernbert_train.models.contrastive:ForVectors",
        ("vectors", "scores"): "modernbert_train.models.contrastive:ForVectors",
        ("vectors", "tokens"): "modernbert_train.models.contrastive:ForVectorsAndMasked",
        ("vectors", "scores", "tokens"): "modernbert_train.models.contrastive:ForVectorsAndMasked",
        ("class",): "modernbert_train.models.classifier:TextClassifier",
        ("tag",): "modernbert_train.models.classifier:WordClassifier",
        ("answer",): "modernbert_train.models.questions:Answerer",
        ("choice",): "modernbert_train.models.questions:Chooser",
    },
)


def build_model(model: ModelConfig, objective: ObjectiveConfig, compute: ComputeConfig | None = None) -> OnEncoder:
    """Build the model that a run trains, without initialising its weights.

    Args:
        model: the encoder.
        objective: names the heads on it.
        compute: kernels and recomputation; None: the defaults.
    """

    def another(config: ModelConfig) -> Encoder:
        settings = compute or ComputeConfig()
        encoder = ENCODERS[type(config)](config, settings)
        encoder.compute = settings
        return encoder

    return HEADS[objective.heads + objective.idle_heads].build(another(model), objective, another)


def shapes_of(model: ModelConfig, objective: ObjectiveConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by name, the tied decoder once; nothing is allocated."""
    with torch.device("meta"):
        built = build_model(model, objective)
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def all_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return `shapes_of` with every head in `HEADS`, each under its own module name."""
    with torch.device("meta"):
        encoder = ENCODERS[type(model)](model, ComputeConfig())
        built = [HEADS[heads].alone(encoder) for heads in HEADS]
    return {name: tuple(parameter.shape) for each in built for name, parameter in each.named_parameters()}
