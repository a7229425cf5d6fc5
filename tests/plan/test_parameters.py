"""Parameter counts, the basis of memory, checkpoints and the model card."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modernbert_train.config.classify import ClassifyConfig, LoraConfig
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    CausalLmConfig,
    ContrastiveConfig,
    DebertaConfig,
    EsmConfig,
    GemmaConfig,
    LlamaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    NeoBertConfig,
    ObjectiveConfig,
    ReplacedTokensConfig,
    SentenceOrderConfig,
    XLNetConfig,
)
from modernbert_train.models.build import ENCODERS, build_model
from modernbert_train.optim.groups import weights_of
from modernbert_train.plan.census import ENCODER_COUNTS, census
from modernbert_train.plan.parameters import count_parameters

LARGE = ModernBertConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)
TINY = ModernBertConfig(vocab_size=512, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=48)
ROBERTA = BertConfig(vocab_size=50265, segments=1, position_offset=2)
ALBERT = AlbertConfig()
ALBERT_SIZES = {
    "albert-base": (ALBERT, 11_813_810),
    "albert-large": (
        replace(ALBERT, hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096),
        17_847_474,
    ),
    "albert-xlarge": (
        replace(ALBERT, hidden_size=2048, num_layers=24, num_heads=16, intermediate_size=8192),
        59_021_490,
    ),
    "albert-xxlarge": (replace(ALBERT, hidden_size=4096, num_heads=64, intermediate_size=16384), 223_158_450),
}
MODELS_OF_EACH_KIND = {
    "base": ModernBertConfig(),
    "large": LARGE,
    "tiny": TINY,
    "bert": BertConfig(),
    "roberta": ROBERTA,
    "albert": ALBERT,
    "albert, groups and turns": replace(ALBERT, groups=2, group_layers=3),
    "albert, attention shared": replace(ALBERT, sharing="attention", groups=3),
    "albert, ffn shared": replace(ALBERT, sharing="ffn"),
    "albert, nothing shared": replace(ALBERT, sharing="none"),
    "xlnet": XLNetConfig(),
    "deberta": DebertaConfig(),
    "deberta, first version, narrow embedding": DebertaConfig(version="v1", buckets=512, embedding_size=128),
    "llama": LlamaConfig(key_value_heads=4, qkv_bias=True),
    "gemma": GemmaConfig(),
    "neobert": NeoBertConfig(),
    "esm": EsmConfig(),
    "llama, untied": LlamaConfig(tied=False, qk_norm=True, head_width=128),
}


OBJECTIVES = {
    "mlm": MaskedLmConfig(),
    "causal": CausalLmConfig(),
    "sop": SentenceOrderConfig(),
    "rtd": ReplacedTokensConfig(),
    "rtd-as-wide": ReplacedTokensConfig(generator_width=1.0, generator_depth=0.5),
    "rtd-none": ReplacedTokensConfig(sharing="none"),
    "rtd-gdes": ReplacedTokensConfig(sharing="gdes"),
    "rtd-mlm": ReplacedTokensConfig(mlm_head=True),
    "rtd-gdes-mlm": ReplacedTokensConfig(sharing="gdes", mlm_head=True),
    "lora": ClassifyConfig(labels=("a", "b"), lora=LoraConfig(rank=4)),
    "frozen": ClassifyConfig(labels=("a", "b"), freeze=True),
    "contrastive": ContrastiveConfig(learn_temperature=True),
    "contrastive-late": ContrastiveConfig(pooling="late", mlm_head=True),
}


WITH_EACH_OBJECTIVE = ("tiny", "bert", "albert, groups and turns")


@pytest.mark.runs
@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param(name, objective, id=f"{name}-{of}")
        for name in MODELS_OF_EACH_KIND
        for of, objective in OBJECTIVES.items()
        if name in WITH_EACH_OBJECTIVE or of in ("mlm", "rtd", "lora")
    ],
)
def test_counts_equal_the_real_model(name: str, objective: ObjectiveConfig) -> None:
    """Every part, because memory of shards and gathered weights follow from the parts; and every matrix, because FLOPs
    and Muon's work do."""
    config = MODELS_OF_EACH_KIND[name]
    if not config.tied and isinstance(objective, ReplacedTokensConfig):
        pytest.skip("check refuses it")
    with torch.device("meta"):
        model = build_model(config, objective)
    counts = count_parameters(config, objective)

    def numel(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert counts.total == numel(model)
    assert counts.trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    parts = model.encoders  # the last one has the tied table
    assert counts.embedding == parts[-1].embedding().numel()
    assert counts.layers == sum(numel(layer) for part in parts for layer in part.layers)
    each = [numel(layer) for layer in model.model.layers]
    # an ALBERT's layer is two units, and a shared unit counts in each layer
    assert counts.layer == sum(each[unit] for unit in (config.path[1] if isinstance(config, AlbertConfig) else [1]))
    units = [(numel(layer), n) for part in parts for layer, n in zip(part.layers, part.config.unit_passes, strict=True)]
    assert counts.shared == sum(numbers for numbers, times in units if times > 1)
    assert counts.units == sum(times == 1 for _, times in units)
    assert counts.active == counts.total - counts.embedding
    assert counts.root + counts.layers - counts.shared == counts.total
    orthogonalised: Counter[tuple[int, ...]] = Counter()
    for weight in weights_of(model):
        if weight.kind == "matrix":
            rows, columns = weight.parameter.shape
            # Wi of ModernBERT and Wqkv are several matrices; see optim/groups.py
            orthogonalised[rows // weight.parts, columns] += weight.parts
    found: Counter[tuple[int, ...]] = Counter()
    for matrix in census(config, objective).hidden:
        found[matrix.rows, matrix.columns] += matrix.count
    assert found == orthogonalised
    assert counts.hidden == sum(rows * columns * count for (rows, columns), count in orthogonalised.items())
    assert counts.hidden_rows == sum(rows * count for (rows, _), count in orthogonalised.items())


@pytest.mark.parametrize(
    ("config", "total"), [(BertConfig(), 110_106_428), *ALBERT_SIZES.values()], ids=["bert-base", *ALBERT_SIZES]
)
def test_the_published_size_with_a_head_for_pairs(config: ModelConfig, total: int) -> None:
    """BertForPreTraining and AlbertForPreTraining of transformers."""
    assert count_parameters(config, SentenceOrderConfig()).total == total


@pytest.mark.parametrize(
    ("width", "sharing", "millions"),
    [
        (64, "all", 10), (128, "all", 12), (256, "all", 16), (768, "all", 31),
        (64, "none", 87), (128, "none", 89), (256, "none", 93), (768, "none", 108),
        (768, "attention", 83), (768, "ffn", 57), (128, "attention", 64), (128, "ffn", 38),
    ],
)  # fmt: skip
def test_the_published_sizes_of_what_is_shared(width: int, sharing: Any, millions: int) -> None:
    """Tables 3 and 4 of the paper, which count the encoder with its pooler."""
    config = replace(ALBERT, embedding_size=width, sharing=sharing)
    of_tokens, of_pairs = width * (config.hidden_size + 3) + config.vocab_size, 2 * (config.hidden_size + 1)
    total = count_parameters(config, SentenceOrderConfig()).total - of_tokens - of_pairs
    assert total / 1e6 == pytest.approx(millions, abs=1.7)  # the paper cuts and rounds


@pytest.mark.parametrize(
    ("sharing", "total"),
    [("embeddings", 109_483_009 + 33_740_602 - (30_522 + 512 + 2 + 2) * 768), ("none", None)],
)
def test_the_published_size_of_electra_base(sharing: Any, total: int | None) -> None:
    """transformers' discriminator and generator, their embeddings counted once; unshared, the generator has another."""
    counted = count_parameters(BertConfig(), ReplacedTokensConfig(sharing=sharing)).total
    small = count_parameters(BertConfig(hidden_size=256, num_heads=4, intermediate_size=1024)).total
    assert counted == (total or 109_483_009 + small)


def test_every_encoder_that_can_be_built_is_counted() -> None:
    assert ENCODER_COUNTS.keys() == ENCODERS.keys()


@pytest.mark.runs
@pytest.mark.parametrize("shards", [3, 8, 1000])
@pytest.mark.parametrize("name", ["tiny", "bert", "albert, groups and turns", "xlnet", "deberta", "llama"])
def test_the_padding_of_shards_is_that_of_the_real_weights(name: str, shards: int) -> None:
    """FSDP2 gives every rank equally many rows of each weight; over a thousand ranks that is a third more to send."""
    config, objective = MODELS_OF_EACH_KIND[name], SentenceOrderConfig() if name == "bert" else ReplacedTokensConfig()
    with torch.device("meta"):
        model = build_model(config, objective)
    counts, exact = count_parameters(config, objective, shards=shards), count_parameters(config, objective)

    def padded(weights: Iterable[Tensor]) -> int:
        return sum(shards * -(-len(weight) // shards) * math.prod(weight.shape[1:]) for weight in weights)

    assert counts.total == padded(model.parameters()) and counts.weights == len(list(model.parameters()))
    assert counts.layers == sum(padded(layer.parameters()) for part in model.encoders for layer in part.layers)
    assert counts.embedding == padded([model.encoders[-1].embedding()])
    assert (counts.matrices, counts.hidden) == (exact.matrices, exact.hidden)
