"""Encoders against transformers' with the same weights: users load exactly the model that was trained here.

Rows of packed sequences here, a padded batch or single sequences there. Weights are large enough that every term of a
score matters; in fp64 the remaining difference is rounding.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.batches import all_logits, lay_out, mean_loss
from modernbert_train.batch import QUERY_RANK, Batch, Packed
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ModelConfig, ModernBertConfig
from modernbert_train.models.sop import PairHead
from modernbert_train.weights.formats import export_format, xlnet
from modernbert_train.weights.formats.tensors import to_hf
from tests.support.attention import WAYS
from tests.support.encoder_training import pack, sequences
from tests.support.encoders import (
    ALBERT,
    BERT,
    DEBERTA,
    DEBERTA_NARROW,
    DEBERTA_V1,
    ENCODERS,
    ESM,
    LLAMAS,
    MODERNBERT,
    NEOBERT,
    PAD,
    ROBERTA,
    VOCABULARY,
    XLNET,
    assert_same_gradients,
    build,
    fill,
    ids,
    twin_of,
    with_dropout,
)  # fmt: skip

LENGTHS = [300, 1, 64, 128, 129, 65]  # in rows of 352 that hold 301, 321 and 65 tokens: each has a tail of pads
STARTS = [0, 300, 352, 416, 544, 704]
DEEP = replace(MODERNBERT, num_layers=7, global_rope_theta=160_000.0)
YARN = replace(DEEP, rope_scaling="yarn", rope_factor=4.0, rope_original_tokens=64)
CONFIGS: dict[str, ModelConfig] = {
    "modernbert": DEEP,
    "modernbert, yarn": YARN,
    "modernbert, llama3 in all layers": replace(YARN, rope_scaling="llama3", local_rope_scaled=True),
    "modernbert, linear": replace(YARN, rope_scaling="linear"),
    "modernbert with a window of 128": replace(DEEP, local_attention=128),
    "bert": BERT,
    "bert with the other gelu": replace(BERT, activation="gelu_tanh"),
    "roberta": ROBERTA,
    "llama": LLAMAS["llama"],
    "llama, untied": LLAMAS["untied"],
    **{f"albert, {way}": WAYS[way] for way in ("groups and turns", "attention", "ffn in groups")},
}


def padded(sequences: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def rows_of(sequences: list[Tensor]) -> list[list[Tensor]]:
    return [sequences[:2], sequences[2:5], sequences[5:]]


def read_by(twin: Any, apart: list[Tensor], **given: Any) -> Any:
    mask = padded([torch.ones(len(ids)) for ids in apart], 0)
    return twin(input_ids=padded(apart, PAD), attention_mask=mask, output_hidden_states=True, **given)


def predicted(logits: Tensor) -> Tensor:
    """At every third token of each sequence, as `pack` asks."""
    return torch.cat([logits[index, :length:3] for index, length in enumerate(LENGTHS)])


@pytest.mark.runs
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_transformers_sequence_by_sequence(name: str) -> None:
    """Hidden states, logits, loss and all gradients of masked-language modelling, for any sharing of layers."""
    config = CONFIGS[name]
    model = build(config)
    twin, apart = twin_of(model), sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)

    out, hidden_TD = read_by(twin, apart), model.encode(batch.packed)
    states = twin.base_model(padded(apart, PAD), padded([torch.ones(len(ids)) for ids in apart], 0)).last_hidden_state
    for index, start in enumerate(STARTS):
        expected = states[index, : LENGTHS[index]]
        torch.testing.assert_close(hidden_TD[start : start + len(expected)], expected, atol=1e-5, rtol=1e-5)
    logits = predicted(out.logits)
    loss = F.cross_entropy(logits, torch.cat([ids[::3] for ids in apart]))

    chunked, plain = mean_loss(model, batch), mean_loss(model, batch, figures=True)
    torch.testing.assert_close(all_logits(model, batch)[: batch.counts["mlm"]], logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(plain, loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(chunked, loss, atol=1e-6, rtol=1e-6)
    chunked.backward()
    loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_gradients(ours, config, twin)


BOUNDARIES = (0, 45, 70, 76)  # of sequences, the first of which is longer than the farthest distance of a DeBERTa
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
BY_ONE: dict[str, tuple[ModelConfig, Order, torch.dtype]] = {
    **{
        f"{name}, {order}": (each, order, torch.float32) for name, each in LLAMAS.items() for order in ("all", "causal")
    },
    "esm": (ESM, "all", torch.float32),
    "esm, plain": (replace(ESM, token_dropout=False, rope_theta=500.0), "all", torch.float32),
    "neobert": (NEOBERT, "all", torch.float32),
    "deberta": (DEBERTA, "all", torch.float32),
    "deberta in fp64": (DEBERTA, "all", torch.float64),
    "deberta, narrow, in fp64": (DEBERTA_NARROW, "all", torch.float64),
    "deberta v1, whose norms are in fp32 there": (DEBERTA_V1, "all", torch.float32),
}


@pytest.mark.runs
@pytest.mark.parametrize(("config", "order", "dtype"), BY_ONE.values(), ids=BY_ONE)
def test_sequences_of_a_buffer_equal_transformers_one_by_one(
    config: ModelConfig, order: Order, dtype: torch.dtype
) -> None:
    """Logits, and the gradient of every weight. Masks differ between the sequences, whose share an ESM scales by."""
    model = build(config).to(dtype)
    twin, ids_T = twin_of(model, order=order).to(dtype), ids(BOUNDARIES[-1])
    ids_T[[3, 4, 20, 50]] = VOCABULARY.mask_id
    weight_TV = torch.randn(len(ids_T), 160, generator=torch.Generator().manual_seed(1), dtype=dtype)
    hidden_TD = model.encode(lay_out(ids_T, [*BOUNDARIES, BOUNDARIES[-1]], order=order))
    logits_TV = model.logits(hidden_TD, torch.arange(len(ids_T)))
    theirs_TV = torch.cat([twin(ids_T[None, start:end]).logits[0] for start, end in pairwise(BOUNDARIES)])
    near = TOLERANCE[dtype]
    torch.testing.assert_close(logits_TV, theirs_TV, atol=2 * near, rtol=near)
    for logits in (logits_TV, theirs_TV):
        (logits * weight_TV).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, grad in to_hf(export_format(config, order), grads, config).items():  # type: ignore[arg-type]
        expected = twin.get_parameter(name).grad
        assert expected is not None, name
        largest = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(grad, expected, atol=2 * near * largest, rtol=100 * near, msg=name)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("config", "order"),
    [
        (BERT, "seq_relationship_logits"),
        (replace(BERT, activation="gelu_tanh"), "seq_relationship_logits"),
        (ALBERT, "sop_logits"),
    ],
    ids=["bert", "bert with the other gelu", "albert"],
)
def test_pairs_are_those_of_their_pretraining(config: ModelConfig, order: str) -> None:
    """Segments, pooler and the two classes of a pair: values, and gradients of both losses together."""
    model, pair_head = build(config), PairHead(config.hidden_size)
    fill(pair_head, config)
    twin, apart = twin_of(model, pair_head), sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)
    segments = [(torch.arange(len(ids)) >= len(ids) // 3).long() for ids in apart]
    segment_ids_T = torch.zeros_like(batch.packed.input_ids_T)
    for start, own in zip(STARTS, segments, strict=True):
        segment_ids_T[start : start + len(own)] = own
    pair_labels = torch.tensor([0, 1, 1, 0, 1, 0])

    hidden_TD = model.encode(replace(batch.packed, segment_ids_T=segment_ids_T))
    positions, labels = (batch.targets[name][: batch.counts["mlm"]] for name in ("positions_M", "labels_M"))
    logits_MV, pair_logits_P2 = model.logits(hidden_TD, positions), pair_head(hidden_TD[STARTS])
    out = read_by(twin, apart, token_type_ids=padded(segments, 0))
    logits, pair_logits = predicted(out.prediction_logits), out[order]
    torch.testing.assert_close(logits_MV, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(pair_logits_P2, pair_logits, atol=1e-5, rtol=0)
    assert not torch.allclose(model.encode(batch.packed), hidden_TD, atol=1e-2), "segments do nothing"

    (F.cross_entropy(logits_MV, labels) + F.cross_entropy(pair_logits_P2, pair_labels)).backward()
    (F.cross_entropy(logits, labels) + F.cross_entropy(pair_logits, pair_labels)).backward()
    modules = {"": model, "pair_head.": pair_head}
    ours = {f"{start}{name}": p.grad for start, module in modules.items() for name, p in module.named_parameters()}
    assert_same_gradients(ours, config, twin)


@pytest.mark.parametrize("way", WAYS)
def test_large_weights_in_fp64_leave_no_difference(way: str) -> None:
    """Matrices of deviation 0.4 saturate attention and both GELUs, where fp32 rounds too coarsely to tell."""
    config = replace(WAYS[way], init_std=0.4)
    model, pair_head = build(config).double(), PairHead(config.hidden_size).double()
    twin = twin_of(model, pair_head).double()
    a, b = sequences([70, 41])
    with torch.no_grad():
        hidden_TD = model.encode(lay_out(torch.cat([a, b]), [0, 70, 111]))
        for ids, start in ((a, 0), (b, 70)):
            out, own = twin(ids[None], output_hidden_states=True), hidden_TD[start : start + len(ids)]
            torch.testing.assert_close(own, out.hidden_states[-1][0], atol=1e-10, rtol=0)
            logits = model.logits(own, torch.arange(len(ids)))
            torch.testing.assert_close(logits, out.prediction_logits[0], atol=1e-10, rtol=0)
            torch.testing.assert_close(pair_head(own[0]), out.sop_logits[0], atol=1e-10, rtol=0)


BASE = ModernBertConfig(global_rope_theta=160_000.0)
LARGE = replace(BASE, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)
EDGES = [64, 65, 1, 128, 129, 1024]  # at which windows and blocks begin and end


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("config", "lengths"), [(BASE, EDGES), (LARGE, EDGES), (BASE, [8192, 300])], ids=["base", "large", "8192"]
)
def test_real_sizes_equal_transformers(config: ModernBertConfig, lengths: list[int]) -> None:
    """Hidden states, every fifth logit, and the gradient of every weight. Of long documents, which are the point of the
    architecture, without gradients: an error of angles or windows grows with the distance."""
    model, apart, trains = build(config), sequences(lengths, config.vocab_size), lengths is EDGES
    twin, ends = twin_of(model), [0, *accumulate(lengths)]
    twin.set_attn_implementation("sdpa")
    ours = torch.zeros(())
    with torch.set_grad_enabled(trains):
        hidden_TD = model.encode(lay_out(torch.cat(apart), ends))
        for ids_T, start, end in zip(apart, ends[:-1], ends[1:], strict=True):
            states = twin.model(ids_T[None]).last_hidden_state[0]
            logits, found = twin.decoder(twin.head(states[::5])), model.logits(hidden_TD, torch.arange(start, end, 5))
            torch.testing.assert_close(hidden_TD[start:end], states, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
            if trains:
                ours = ours + F.cross_entropy(found, ids_T[::5], reduction="sum")
                F.cross_entropy(logits, ids_T[::5], reduction="sum").backward()
    if trains:
        ours.backward()
        assert_same_gradients({name: each.grad for name, each in model.named_parameters()}, config, twin)


def times_0_7(module: nn.Dropout, x: Tensor) -> Tensor:
    """Replaces a Dropout's forward; tensors of 4 dimensions are the probabilities of transformers' XLNet."""
    return 0.7 * x if module.training and x.dim() < 4 else x


@pytest.mark.parametrize("name", ["bert", "albert", "deberta", "deberta, narrow", "xlnet"])
@torch.no_grad()
def test_hidden_states_in_training_mode_equal_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout in another place, a published recipe regularises another model. Random masks cannot be compared, so
    each dropout multiplies by 0.7. Dropout of attention probabilities is not compared, since no encoder here has it."""
    model = build(with_dropout(ENCODERS[name], 0.1))
    twin, apart = twin_of(model).base_model, sequences([37, 20])
    packed = lay_out(torch.cat(apart), [0, 37, 57])
    still = model.encode(packed)
    monkeypatch.setattr(nn.Dropout, "forward", times_0_7)
    model.train()
    for module in twin.modules():  # theirs of probabilities have a separate rate, or are absent here
        if isinstance(module, nn.Dropout):
            module.train()
    hidden_TD = model.encode(packed)
    assert (hidden_TD - still).abs().max() > 0.1
    expected = torch.cat([twin(input_ids=ids[None])[0][0] for ids in apart])
    torch.testing.assert_close(hidden_TD, expected, atol=1e-5, rtol=1e-5)


CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EXACT = {torch.float32: CLOSE, torch.float64: {"atol": 1e-11, "rtol": 1e-11}}
PRECISIONS = pytest.mark.parametrize("dtype", EXACT, ids=["fp32", "fp64"])


@pytest.mark.runs
@PRECISIONS
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("order", "activation"), [("all", "gelu"), ("all", "gelu_tanh"), ("causal", "gelu")])
@torch.no_grad()
def test_xlnets_states_and_logits_equal_transformers(
    order: Any, activation: Any, typed: bool, dtype: torch.dtype
) -> None:
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


def test_gradients_of_both_streams_equal_transformers() -> None:
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


def test_what_a_batch_of_xlnet_has_not_still_has_a_gradient() -> None:
    """Of zero: ranks that meet after a step wait for every weight, and no weight may drift by rounding."""
    model = build(XLNET)
    model.encode(lay_out(ids(20), [0, 20])).square().sum().backward()
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None, name
        unused = any(part in name for part in ("query.", "segment.", "segments."))
        assert bool((parameter.grad == 0).all()) is unused, name
