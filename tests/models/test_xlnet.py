"""XLNet, held against transformers' with the same weights: one that differs would not be the XLNet that people know.

Weights are large enough that every term of a score matters; in fp64 what is left of the difference is rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.batches import lay_out
from modernbert_train.batch import QUERY_RANK, Batch, Packed
from modernbert_train.config.schema import ComputeConfig, PermutationLmConfig, XLNetConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import build_model
from modernbert_train.models.init import count_parameters, initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.models.xlnet import XLNet
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import xlnet
from modernbert_train.weights.formats.tensors import to_hf
from modernbert_train.weights.formats.xlnet import describe
from tests.objectives.test_mlm import VOCABULARY

Make = Callable[..., Any]
SMALL = XLNetConfig(
    vocab_size=160, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, init_std=0.4, dropout=0.0
)
LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EXACT = {torch.float32: CLOSE, torch.float64: {"atol": 1e-11, "rtol": 1e-11}}
PRECISIONS = pytest.mark.parametrize("dtype", EXACT, ids=["fp32", "fp64"])


def build(config: XLNetConfig = SMALL, **compute: Any) -> ForMaskedLM:
    """With norms and biases that are no ones and zeros."""
    model = build_model(config, PermutationLmConfig(), ComputeConfig(**({"attention": "sdpa"} | compute)))
    initialize(model, config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def twin_of(model: ForMaskedLM, order: Any = "all", dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, by our own config.json and names."""
    settings = describe(model.config, order, {"model", "decoder"}, 64, VOCABULARY)
    twin = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**settings))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "decoder.weight"}
    missing, unexpected = twin.load_state_dict(to_hf(xlnet, weights, model.config), strict=False)
    assert missing == ["lm_loss.weight"] and not unexpected
    twin.tie_weights()
    return twin.eval().to(dtype)


def ids(size: int, seed: int = 5) -> Tensor:
    return torch.randint(5, 160, (size,), generator=torch.Generator().manual_seed(seed))


@PRECISIONS
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("order", "activation"), [("all", "gelu"), ("all", "gelu_tanh"), ("causal", "gelu")])
@torch.no_grad()
def test_states_and_logits_are_those_of_transformers(
    order: Any, activation: Any, typed: bool, dtype: torch.dtype
) -> None:
    """Packed, against each sequence alone; with token types, of which only the same or another counts."""
    model = build(replace(SMALL, activation=activation)).to(dtype)
    ids_T, types_T = ids(70), torch.tensor([0] * 20 + [1] * 25 + [0] * 5 + [1] * 20)
    packed = replace(lay_out(ids_T, [0, 45, 70, 70], order=order), segment_ids_T=types_T if typed else None)
    hidden_TD = model.encode(packed)
    logits_TV = model.logits(hidden_TD, torch.arange(70))
    twin = twin_of(model, order, dtype)
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
def test_both_streams_are_those_of_transformers(typed: bool) -> None:
    """Content and query stream of an order, with perm_mask and target_mapping there, and one buffer here. Two streams
    of transformers compute in fp32 alone."""
    model = build()
    packed, given = two_streams(typed)
    hidden_TD = model.encode(packed)
    twin = twin_of(model, "given")
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


def test_gradients_are_those_of_transformers() -> None:
    """Of every weight, the vector of query tokens and what is added to queries among them."""
    model = build()
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
    for name, gradient in to_hf(xlnet, ours, model.config).items():
        expected = theirs[name].grad
        assert expected is not None and expected.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, expected, atol=2e-4, rtol=1e-3, msg=name)


def test_what_a_batch_has_not_still_has_a_gradient() -> None:
    """Of zero: ranks that meet after a step wait for every weight, and no weight may drift by rounding."""
    model = build()
    model.encode(lay_out(ids(20), [0, 20])).square().sum().backward()
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is not None, name
        unused = any(part in name for part in ("query.", "segment.", "segments."))
        assert bool((parameter.grad == 0).all()) is unused, name


@torch.no_grad()
def test_packed_sequences_are_as_one_by_one(sequences: Make, pack: Make) -> None:
    """Whatever shares the row, and however long rows may be: distances are looked up in a table of all of them."""
    model = build()
    first, second, third = sequences([30, 50, 7])
    together = model.encode(pack([[first, second], [third]], row_tokens=90).packed)
    for start, own in ((0, first), (30, second), (90, third)):
        alone = model.encode(pack([[own]], row_tokens=len(own)).packed)
        torch.testing.assert_close(together[start : start + len(own)], alone[: len(own)], **CLOSE)


@torch.no_grad()
def test_only_distances_count(sequences: Make, pack: Make) -> None:
    """Positions that all begin elsewhere give the same; another order of them does not."""
    model = build()
    (own,) = sequences([40])
    packed = pack([[own]], row_tokens=60, spare=0).packed
    moved_T = packed.position_ids_T.clone()
    moved_T[:40] += 17
    moved = replace(packed, position_ids_T=moved_T)
    torch.testing.assert_close(model.encode(moved)[:40], model.encode(packed)[:40], **CLOSE)
    turned = replace(packed, position_ids_T=torch.cat([packed.position_ids_T[:40].flip(0), moved_T[40:]]))
    assert not torch.allclose(model.encode(turned)[:40], model.encode(packed)[:40], atol=1e-2)


def test_dropout_is_in_training_alone_and_follows_the_phase(sequences: Make, pack: Make) -> None:
    model = build(replace(SMALL, dropout=0.1))
    packed = pack([sequences([40])], row_tokens=50).packed
    still = model.encode(packed)
    assert torch.equal(model.encode(packed), still)
    model.train()
    assert not torch.equal(model.encode(packed), still)
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.1] * (2 + 2 * SMALL.num_layers)
    model.set_phase(SMALL)
    assert torch.equal(model.encode(packed), still)


@pytest.mark.runs
def test_layers_compile_once_whatever_the_documents(sequences: Make, pack: Make) -> None:
    """What is added to scores is another object in every microbatch; nothing may be compiled again for it."""
    torch._dynamo.reset()
    counters.clear()
    model, plain = build().train(), build().train()
    model.compile_layers(backend="aot_eager")
    compiled = []
    for lengths in ([96], [50, 20], [1, 2, 3, 90], [3] * 30):
        packed = pack([sequences(lengths)], row_tokens=96).packed
        out = model.encode(packed)
        out.square().mean().backward()
        torch.testing.assert_close(out, plain.encode(packed), **CLOSE)
        compiled.append(counters["stats"]["unique_graphs"])
    assert len(set(compiled)) == 1, compiled


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recomputation_gives_the_same_gradients(sequences: Make, pack: Make, checkpointing: bool) -> None:
    packed = pack([sequences([40, 12])], row_tokens=60).packed
    gradients = []
    for recompute in (False, checkpointing):
        model = build(activation_checkpointing=recompute)
        model.encode(packed).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True) if one is not None)


def test_a_kernel_without_a_bias_is_refused() -> None:
    """It would leave out where tokens stand; on a login node `check` says so."""
    with pytest.raises(ConfigError, match=r"compute\.attention=flex: .*Usable here: sdpa"):
        build(attention="flex").encode(lay_out(ids(8), [0, 8]))


def test_initial_weights_are_of_one_deviation() -> None:
    """What is added to queries and the vector of query tokens too; biases zero, norms one."""
    config = XLNetConfig(vocab_size=1024, hidden_size=256, num_layers=2, num_heads=4, intermediate_size=384)
    model = build_model(config, PermutationLmConfig())
    initialize(model, config, seed=17)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.8796 * 0.02, rel=0.12), name  # truncated at 2
            assert parameter.abs().max().item() <= 0.04, name


@pytest.mark.parametrize(("changes", "total"), [({}, 116_750_336), (LARGE, 360_300_800)], ids=["base", "large"])
def test_counts_are_the_published_models(changes: dict[str, Any], total: int) -> None:
    """By arithmetic alone, of our model and of transformers', which share no code."""
    config = XLNetConfig(**changes)
    with torch.device("meta"):
        model = build_model(config, PermutationLmConfig())
        settings = describe(config, "given", {"model", "decoder"}, 512, VOCABULARY)
        twin = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**settings))
    counts, encoder = planned.count_parameters(config), model.model
    assert isinstance(encoder, XLNet)
    assert counts.total == total == count_parameters(model) == sum(p.numel() for p in twin.parameters())
    assert counts.layers == sum(parameter.numel() for parameter in encoder.layers.parameters())
    assert counts.layer == sum(parameter.numel() for parameter in encoder.layers[0].parameters())
    assert counts.embedding == encoder.embedding().numel()
    matrices = [module.weight for module in encoder.modules() if isinstance(module, nn.Linear)]
    assert counts.hidden == sum(matrix.numel() for matrix in matrices)
