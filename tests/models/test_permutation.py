"""Permutation language modelling on every encoder: no target may reach its own prediction.

A leak here gives the best loss of all, and a model that has learnt to copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from modernbert_train.batch import IGNORED_LABEL, QUERY_RANK, Inputs, Packed, PackedText
from modernbert_train.config.schema import ComputeConfig, PermutationLmConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.objectives.permutation import PermutationLM
from tests.support.encoders import ENCODERS
from tests.support.mlm_lines import VOCABULARY, text_of

CONFIG = PermutationLmConfig(context_ratio=3)
EACH = pytest.mark.parametrize("name", ["modernbert", "bert", "distilbert", "xlnet", "deberta", "llama"])


def built(name: str) -> ForMaskedLM:
    model = build_model(ENCODERS[name], CONFIG, ComputeConfig(attention="sdpa"))
    initialize(model, ENCODERS[name], seed=3)
    return model.eval()


def made(text: PackedText, config: PermutationLmConfig = CONFIG) -> tuple[Inputs, Packed]:
    inputs = PermutationLM(config, VOCABULARY).make(text, config)
    assert inputs.given is not None
    names = ("position_ids_T", "boundaries", "ranks_T", "limits_T")
    position_ids_T, boundaries, ranks_T, limits_T = (torch.from_numpy(getattr(inputs.given, name)) for name in names)
    packed = Packed(torch.from_numpy(inputs.ids_T), position_ids_T, boundaries.int(), 64, order="given")
    return inputs, replace(packed, ranks_T=ranks_T, limits_T=limits_T)


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
def test_a_later_token_changes_nothing_before_it_in_the_order(name: str) -> None:
    """Bit by bit: tokens that are not predicted, earlier targets and their queries, and its own query."""
    model = built(name)
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
def test_a_query_sees_its_place_and_its_context(name: str) -> None:
    """Its position is the only difference between two query tokens with the same context."""
    model = built(name)
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
def test_the_first_of_an_order_without_context_is_finite(name: str) -> None:
    """With every token predicted, the first in the order sees nothing: zeros, where transformers has a mean of all."""
    model, (inputs, packed) = built(name), made(text_of([12, 1]), PermutationLmConfig(context_ratio=1))
    assert packed.ranks_T is not None and packed.limits_T is not None
    assert (packed.limits_T[packed.ranks_T == QUERY_RANK] == 0).any()
    queries = torch.from_numpy(inputs.targets["positions_M"])[: inputs.counts["permutation"]]
    model.logits(model.encode(packed), queries).square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


@EACH
@torch.no_grad()
def test_sequences_see_only_themselves(name: str) -> None:
    """Packed with others, and alone with the very same order."""
    model = built(name)
    text = text_of([40, 22, 9])
    _, packed = made(text)
    start, end = packed.cu_seqlens_S[1:3].tolist()
    own, names = slice(start, end), ("input_ids_T", "position_ids_T", "ranks_T", "limits_T")
    parts: dict[str, Any] = {name: getattr(packed, name)[own] for name in names}
    alone = replace(packed, **parts, cu_seqlens_S=torch.tensor([0, end - start], dtype=torch.int32))
    torch.testing.assert_close(model.encode(alone), model.encode(packed)[own], atol=1e-5, rtol=0)
    assert np.isfinite(model.encode(packed).numpy()).all()
