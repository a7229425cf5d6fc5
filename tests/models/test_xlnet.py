"""XLNet, compared with transformers' with the same weights: a different one would not be the published XLNet.

Weights are large enough that every term of a score matters; in fp64 the remaining difference is rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.batches import lay_out
from modernbert_train.batch import QUERY_RANK, Batch, Packed
from modernbert_train.weights.formats import xlnet
from modernbert_train.weights.formats.tensors import to_hf
from tests.support.encoders import XLNET, build, ids, twin_of

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EXACT = {torch.float32: CLOSE, torch.float64: {"atol": 1e-11, "rtol": 1e-11}}
PRECISIONS = pytest.mark.parametrize("dtype", EXACT, ids=["fp32", "fp64"])


@pytest.mark.runs
@PRECISIONS
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("order", "activation"), [("all", "gelu"), ("all", "gelu_tanh"), ("causal", "gelu")])
@torch.no_grad()
def test_states_and_logits_equal_transformers(order: Any, activation: Any, typed: bool, dtype: torch.dtype) -> None:
    """Packed, against each sequence alone; with token types, of which only the same or another counts."""
    model = build(replace(XLNET, activation=activation)).to(dtype)
    ids_T, types_T = ids(70), torch.tensor([0] * 20 + [1] * 25 + [0] * 5 + [1] * 20)
    packed = replace(lay_out(ids_T, [0, 45, 70, 70], order=order), segment_ids_T=types_T if typed else None)
    hidden_TD = model.encode(packed)
    logits_TV = model.logits(hidden_TD, torch.arange(70))
    twin = twin_of(model, order=order).to(dtype)
    for own in (slice(0, 45), slice(45, 70)):
        given = {"token_type_ids": types_T[None, own]} if typed else {}
        theirs = twin(ids_T[None, own], output_hidden_states=True, **given)
        torch.testing.assert_close(hidden_TD[own], theirs.hidden_states[-1][0], **EXACT[dtype])
        many = EXACT[dtype] if dtype is torch.float64 else {"atol": 3e-5, "rtol": 1e-5}  # of numbers up to 30
        torch.testing.assert_close(logits_TV[own], theirs.logits[0], **many)
    if typed:
        plain_TD = model.encode(replace(packed, segment_ids_T=None))
        assert not torch.allclose(plain_TD[:45], hidden_TD[:45], atol=1e-2)
        one_TD = model.encode(replace(packed, segment_ids_T=torch.ones_like(types_T)))
        torch.testing.assert_close(one_TD, plain_TD, **CLOSE)  # all of one segment is as none


def permuted(size: int, predicted: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Ranks and limits of a sequence, for which transformers has a table."""
    order = torch.randperm(len(predicted), generator=torch.Generator().manual_seed(seed))
    ranks = torch.full((size,), -1)
    ranks[torch.tensor(predicted)] = order
    return ranks, ranks + 1


def two_streams(typed: bool) -> tuple[Packed, list[dict[str, Any]]]:
    """Two sequences with query tokens, and what transformers is given for each; the queries are its targets."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("ids", "places", "ranks", "limits", "types")}
    boundaries, theirs = [0], []
    for number, (size, predicted) in enumerate(((30, [3, 4, 5, 11, 20, 28]), (19, [0, 9, 10]))):
        own = ids(size, seed=number)
        ranks, limits = permuted(size, predicted, seed=number)
        types = (torch.arange(size) >= size // 3).long()
        at = torch.tensor(predicted)
        parts["ids"] += [own, torch.full((len(at),), 4)]
        parts["places"] += [torch.arange(size), at]
        parts["ranks"] += [ranks, torch.full((len(at),), QUERY_RANK)]
        parts["limits"] += [limits, ranks[at]]
        parts["types"] += [types, types[at]]
        boundaries.append(boundaries[-1] + size + len(at))
        asked = torch.where(ranks >= 0, ranks, 0)  # of a token as a query: itself is not before it
        hidden = (ranks[None, :] >= asked[:, None]).float()[None]
        mapping = torch.zeros(1, len(at), size).scatter(2, at[None, :, None], 1.0)
        given = {"input_ids": own[None], "perm_mask": hidden, "target_mapping": mapping}
        theirs.append(given | ({"token_type_ids": types[None]} if typed else {}))
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    packed = Packed(
        joined["ids"], joined["places"], torch.tensor(boundaries, dtype=torch.int32), 30,
        segment_ids_T=joined["types"] if typed else None, order="given", ranks_T=joined["ranks"],
        limits_T=joined["limits"],
    )  # fmt: skip
    return packed, theirs


@pytest.mark.parametrize("typed", [False, True])
@torch.no_grad()
def test_both_streams_equal_transformers(typed: bool) -> None:
    """Content and query stream of an order, with perm_mask and target_mapping there, and one buffer here. Two streams
    of transformers compute in fp32 alone."""
    model = build(XLNET)
    packed, given = two_streams(typed)
    hidden_TD = model.encode(packed)
    twin = twin_of(model, order="given")
    start = 0
    for inputs in given:
        size, asked = inputs["input_ids"].shape[1], inputs["target_mapping"].shape[1]
        theirs = twin(**inputs, output_hidden_states=True)
        content, query = theirs.hidden_states[-2][0], theirs.hidden_states[-1][0]
        torch.testing.assert_close(hidden_TD[start : start + size], content, **CLOSE)
        queries = torch.arange(start + size, start + size + asked)
        torch.testing.assert_close(hidden_TD[queries], query, **CLOSE)
        torch.testing.assert_close(model.logits(hidden_TD, queries), theirs.logits[0], atol=3e-5, rtol=1e-5)
        start += size + asked


def test_gradients_equal_transformers() -> None:
    """Of every weight, the vector of query tokens and the biases of queries among them."""
    model = build(XLNET)
    packed, given = two_streams(typed=True)
    positions = (packed.ranks_T == QUERY_RANK).nonzero().flatten()  # type: ignore[union-attr]
    labels = ids(len(positions), seed=9)
    batch = Batch(packed, {"positions_M": positions, "labels_M": labels}, {"permutation": len(positions)})
    model(batch).losses["permutation"].backward()
    twin = twin_of(model)
    logits = torch.cat([twin(**inputs).logits[0] for inputs in given])
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    named = dict(model.named_parameters())
    ours = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    assert ours.keys() == named.keys()
    theirs = dict(twin.named_parameters())
    for name, gradient in to_hf(xlnet.FORMAT, ours, model.config).items():
        expected = theirs[name].grad
        assert expected is not None and expected.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, expected, atol=2e-4, rtol=1e-3, msg=name)


def test_what_a_batch_has_not_still_has_a_gradient() -> None:
    """Of zero: ranks that meet after a step wait for every weight, and no weight may drift by rounding."""
    model = build(XLNET)
    model.encode(lay_out(ids(20), [0, 20])).square().sum().backward()
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None, name
        unused = any(part in name for part in ("query.", "segment.", "segments."))
        assert bool((parameter.grad == 0).all()) is unused, name
