"""Permutation language modelling on every encoder: no target may reach its own prediction.

A leak here gives the best loss of all, and a model that has learnt to copy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from modernbert_train.batch import IGNORED_LABEL, QUERY_RANK, Inputs, Packed, PackedText
from modernbert_train.config.schema import (
    BertConfig,
    ComputeConfig,
    DebertaConfig,
    DistilBertConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    PermutationLmConfig,
    XLNetConfig,
)
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.objectives.permutation import PermutationLM
from tests.support.mlm_lines import VOCABULARY, text_of

SHAPE = {"vocab_size": 100, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "init_std": 0.3}
ENCODERS: dict[str, ModelConfig] = {
    "modernbert": ModernBertConfig(**SHAPE, num_layers=4, local_attention=8),
    "bert": BertConfig(**SHAPE, num_layers=2, max_positions=64),
    "distilbert": DistilBertConfig(**SHAPE, num_layers=2, max_positions=64),
    "xlnet": XLNetConfig(**SHAPE, num_layers=2),
    "deberta": DebertaConfig(**SHAPE, num_layers=2, buckets=4, max_distance=9),
    "llama": LlamaConfig(**SHAPE, num_layers=2),
}
CONFIG = PermutationLmConfig(context_ratio=3)
EACH = pytest.mark.parametrize("config", ENCODERS.values(), ids=ENCODERS)


def built(config: ModelConfig) -> ForMaskedLM:
    model = build_model(config, CONFIG, ComputeConfig(attention="sdpa"))
    initialize(model, config, seed=3)
    return model.eval()


def made(text: PackedText) -> tuple[Inputs, Packed]:
    inputs = PermutationLM(CONFIG, VOCABULARY).make(text, CONFIG)
    given = inputs.given
    assert given is not None
    ids_T, positions_T, ranks_T, limits_T = (
        torch.from_numpy(each) for each in (inputs.ids_T, given.position_ids_T, given.ranks_T, given.limits_T)
    )
    boundaries = torch.from_numpy(given.boundaries).int()
    packed = Packed(ids_T, positions_T, boundaries, 64, order="given", ranks_T=ranks_T, limits_T=limits_T)
    return inputs, packed


def in_order(inputs: Inputs, packed: Packed, sequence: int) -> list[tuple[int, int]]:
    """Of a sequence the predicted tokens in their order, each with its query token: indices of the buffer."""
    assert packed.ranks_T is not None and packed.limits_T is not None
    start, end = packed.cu_seqlens_S[sequence : sequence + 2].tolist()
    queries = inputs.targets["positions_M"][inputs.targets["labels_M"] != IGNORED_LABEL]
    own = [int(query) for query in queries if start <= query < end]
    own.sort(key=lambda query: int(packed.limits_T[query]))
    return [(start + int(packed.position_ids_T[query]), query) for query in own]


@EACH
@torch.no_grad()
def test_a_later_token_changes_nothing_before_it_in_the_order(config: ModelConfig) -> None:
    """Bit by bit: tokens that are not predicted, earlier targets and their queries, and its own query."""
    model = built(config)
    inputs, packed = made(text_of([40, 22], tail=6))
    pairs = in_order(inputs, packed, 0)
    before = model.encode(packed)
    end = int(packed.cu_seqlens_S[1])
    for number in (0, len(pairs) // 2, len(pairs) - 1):
        target, query = pairs[number]
        ids_T = packed.input_ids_T.clone()
        ids_T[target] = 5 + (ids_T[target] - 5 + 17) % 90
        after = model.encode(replace(packed, input_ids_T=ids_T))
        changed = (before != after).any(dim=1)
        assert packed.ranks_T is not None and packed.limits_T is not None
        sees = packed.limits_T[:end] > packed.ranks_T[target]
        assert changed[target] and not changed[query] and not changed[end:].any()
        assert torch.equal(changed[:end], sees), "those that see it, and they alone"
        assert [bool(changed[each]) for _, each in pairs] == [later > number for later in range(len(pairs))]


@EACH
@torch.no_grad()
def test_a_query_sees_its_place_and_its_context(config: ModelConfig) -> None:
    """Its position is the only difference between two query tokens with the same context."""
    model = built(config)
    inputs, packed = made(text_of([40, 22]))
    _, query = in_order(inputs, packed, 0)[3]
    moved_T = packed.position_ids_T.clone()
    moved_T[query] = (moved_T[query] + 11) % 42
    before, after = model.encode(packed), model.encode(replace(packed, position_ids_T=moved_T))
    assert (before != after).any(dim=1).nonzero().flatten().tolist() == [query]
    ids_T = packed.input_ids_T.clone()
    assert packed.ranks_T is not None
    ids_T[packed.ranks_T == -1] = 7
    assert not torch.allclose(model.encode(replace(packed, input_ids_T=ids_T))[query], before[query], atol=1e-2)


@EACH
def test_the_first_of_an_order_without_context_is_finite(config: ModelConfig) -> None:
    """With every token predicted, the first in the order sees nothing: zeros, where transformers has a mean of all."""
    every = PermutationLmConfig(context_ratio=1)
    model, text = built(config), text_of([12, 1])
    inputs = PermutationLM(every, VOCABULARY).make(text, every)
    given = inputs.given
    assert given is not None and (given.limits_T[given.ranks_T == QUERY_RANK] == 0).any()
    names = ("position_ids_T", "boundaries", "ranks_T", "limits_T")
    position_ids_T, boundaries, ranks_T, limits_T = (torch.from_numpy(getattr(given, name)) for name in names)
    packed = Packed(
        torch.from_numpy(inputs.ids_T), position_ids_T, boundaries.int(), 64, order="given", ranks_T=ranks_T,
        limits_T=limits_T,
    )  # fmt: skip
    queries = torch.from_numpy(inputs.targets["positions_M"])[: inputs.counts["permutation"]]
    model.logits(model.encode(packed), queries).square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@EACH
@torch.no_grad()
def test_sequences_see_only_themselves(config: ModelConfig) -> None:
    """Packed with others, and alone with the very same order."""
    model = built(config)
    text = text_of([40, 22, 9])
    _, packed = made(text)
    start, end = packed.cu_seqlens_S[1:3].tolist()
    assert packed.ranks_T is not None and packed.limits_T is not None
    own = slice(start, end)
    alone = replace(
        packed,
        input_ids_T=packed.input_ids_T[own],
        position_ids_T=packed.position_ids_T[own],
        cu_seqlens_S=torch.tensor([0, end - start], dtype=torch.int32),
        ranks_T=packed.ranks_T[own],
        limits_T=packed.limits_T[own],
    )
    torch.testing.assert_close(model.encode(alone), model.encode(packed)[own], atol=1e-5, rtol=0)
    assert np.isfinite(model.encode(packed).numpy()).all()
