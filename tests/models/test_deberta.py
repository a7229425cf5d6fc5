"""DeBERTa, held against transformers' with the same weights: another would not be the DeBERTa that people know.

Weights are large enough that every term of a score matters. Buckets are few, so that sequences have near distances, far
ones that share buckets, and farther ones than any bucket reaches. Heads are 12 wide: transformers divides by the square
root of 36 in fp32.
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
from modernbert_train.batch import Batch
from modernbert_train.config.schema import ComputeConfig, DebertaConfig, MaskedLmConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.build import build_model
from modernbert_train.models.deberta import Deberta, distance_rows
from modernbert_train.models.init import count_parameters, initialize
from modernbert_train.models.masked_lm import ForMaskedLM
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import deberta
from modernbert_train.weights.formats.deberta import describe
from modernbert_train.weights.formats.tensors import to_hf
from tests.objectives.test_mlm import VOCABULARY

Make = Callable[..., Any]
SMALL = DebertaConfig(
    vocab_size=160, hidden_size=48, num_layers=2, num_heads=4, intermediate_size=56, max_positions=96, buckets=8,
    max_distance=16, init_std=0.3, dropout=0.0,
)  # fmt: skip
FIRST = replace(SMALL, version="v1", buckets=16)
NARROW = replace(SMALL, embedding_size=24, activation="gelu_tanh", convolution=3)
LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096}
CONFIGS = pytest.mark.parametrize("config", [SMALL, NARROW, FIRST], ids=["v2", "narrow", "v1"])
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
EXACT = {torch.float32: CLOSE, torch.float64: {"atol": 1e-11, "rtol": 1e-11}}
BOUNDARIES = (0, 45, 70, 76)


def build(config: DebertaConfig = SMALL, **compute: Any) -> ForMaskedLM:
    """With norms and biases that are no ones and zeros."""
    model = build_model(config, MaskedLmConfig(), ComputeConfig(**({"attention": "sdpa"} | compute)))
    assert isinstance(model, ForMaskedLM)
    initialize(model, config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def twin_of(model: ForMaskedLM, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, by our own config.json and names."""
    settings = describe(model.config, "all", {"model", "head", "decoder"}, 64, VOCABULARY)
    first = model.config.version == "v1"
    kind: Any = transformers.DebertaForMaskedLM if first else transformers.DebertaV2ForMaskedLM
    twin = kind((transformers.DebertaConfig if first else transformers.DebertaV2Config)(**settings))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "decoder.weight"}
    missing, unexpected = twin.load_state_dict(to_hf(deberta, weights, model.config), strict=False)
    assert sorted(missing) == [f"cls.predictions.decoder.{end}" for end in ("bias", "weight")] and not unexpected
    twin.tie_weights()
    return twin.eval().to(dtype)


def ids(size: int, seed: int = 5) -> Tensor:
    return torch.randint(5, 160, (size,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(SMALL, torch.float32), (SMALL, torch.float64), (NARROW, torch.float64), (FIRST, torch.float32)],
    ids=["v2", "v2 in fp64", "narrow in fp64", "v1, whose norms are in fp32 there"],
)
@torch.no_grad()
def test_states_and_logits_are_those_of_transformers(config: DebertaConfig, dtype: torch.dtype) -> None:
    """Packed, against each sequence alone, some longer than the farthest distance; the bare encoder's states too."""
    model = build(config).to(dtype)
    ids_T = ids(BOUNDARIES[-1])
    hidden_TD = model.encode(lay_out(ids_T, [*BOUNDARIES, BOUNDARIES[-1]]))
    logits_TV = model.logits(hidden_TD, torch.arange(len(ids_T)))
    twin = twin_of(model, dtype)
    for own in map(slice, BOUNDARIES[:-1], BOUNDARIES[1:]):
        theirs = twin(ids_T[None, own])
        torch.testing.assert_close(hidden_TD[own], twin.deberta(ids_T[None, own]).last_hidden_state[0], **EXACT[dtype])
        torch.testing.assert_close(logits_TV[own], theirs.logits[0], **EXACT[dtype])


@CONFIGS
def test_gradients_are_those_of_transformers(config: DebertaConfig) -> None:
    """Of every weight, the table of distances among them."""
    model = build(config)
    ids_T, labels = ids(BOUNDARIES[-1]), ids(20, seed=9)
    positions = torch.arange(0, 60, 3)
    packed = lay_out(ids_T, [*BOUNDARIES])
    model(Batch(packed, {"positions_M": positions, "labels_M": labels}, {"mlm": 20})).losses["mlm"].backward()
    twin = twin_of(model)
    logits = torch.cat([twin(ids_T[None, own]).logits[0] for own in map(slice, BOUNDARIES[:-1], BOUNDARIES[1:])])
    nn.functional.cross_entropy(logits[positions], labels, reduction="sum").backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in ours.values())
    theirs = dict(twin.named_parameters())
    for name, gradient in to_hf(deberta, ours, model.config).items():  # type: ignore[arg-type]
        expected = theirs[name].grad
        assert expected is not None and expected.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, expected, atol=2e-4, rtol=1e-3, msg=name)


def test_rows_of_distances_are_the_published_ones() -> None:
    """256 buckets up to 512: by hand at the edges, and by transformers' own function for all, farther ones too."""
    rows = distance_rows(DebertaConfig(), 1000)
    by_hand = {
        -999: 0, -511: 1, -510: 1, -128: 128, -1: 255, 0: 256, 1: 257, 128: 384, 129: 385, 511: 511, 512: 511, 999: 511
    }  # fmt: skip
    assert {distance: int(rows[999 + distance]) for distance in by_hand} == by_hand
    theirs = transformers.models.deberta_v2.modeling_deberta_v2.make_log_bucket_position
    distances = torch.arange(-2999, 3000)
    for buckets, farthest in ((256, 512), (256, 2048), (32, 128), (7, 40), (8, 16)):
        expected = (theirs(distances, buckets, farthest).long() + buckets).clamp(0, 2 * buckets - 1)
        config = replace(SMALL, buckets=buckets, max_distance=farthest)
        assert torch.equal(distance_rows(config, 3000), expected), (buckets, farthest)


@torch.no_grad()
def test_a_longer_context_leaves_shorter_texts_as_they_were(sequences: Make, pack: Make) -> None:
    """A phase of longer rows raises max_positions: the weights fit, texts of before have the same states to the
    bit, and longer ones are what transformers computes of them. With max_distance raised too, near distances keep
    their rows and far ones are told apart again."""
    short = replace(SMALL, max_positions=20)
    model = build(short)
    before, longer = pack([sequences([20])], row_tokens=20), pack([sequences([90])], row_tokens=90)
    was = model.encode(before.packed)
    with pytest.raises(ValueError, match=r"sequences of up to 90 tokens, but model\.max_positions=20"):
        model.encode(longer.packed)
    extended = replace(short, max_positions=90)
    model.set_phase(extended)
    assert torch.equal(model.encode(before.packed), was)
    settings = describe(extended, "all", (), 90, VOCABULARY)
    assert (settings["max_position_embeddings"], settings["max_relative_positions"]) == (90, 16)
    ids_T = longer.packed.input_ids_T[None, :90]
    torch.testing.assert_close(model.encode(longer.packed)[:90], twin_of(model).deberta(ids_T)[0][0], **CLOSE)

    stretched = replace(extended, max_distance=90)
    model.set_phase(stretched)
    torch.testing.assert_close(model.encode(longer.packed)[:90], twin_of(model).deberta(ids_T)[0][0], **CLOSE)
    rows, wider = distance_rows(extended, 90), distance_rows(stretched, 90)
    near, far = slice(89 - 4, 89 + 5), slice(89 + 5, None)
    assert torch.equal(rows[near], wider[near]) and len({*rows[far].tolist()}) == len({*wider[far].tolist()}) == 3
    assert rows[89 + 20] == rows[89 + 89] and wider[89 + 20] < wider[89 + 89]


@CONFIGS
@torch.no_grad()
def test_packed_sequences_are_as_one_by_one(config: DebertaConfig, sequences: Make, pack: Make) -> None:
    """Whatever shares the row, and however long rows may be."""
    model = build(config)
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
    torch.testing.assert_close(model.encode(replace(packed, position_ids_T=moved_T))[:40], model.encode(packed)[:40])
    turned = replace(packed, position_ids_T=torch.cat([packed.position_ids_T[:40].flip(0), moved_T[40:]]))
    assert not torch.allclose(model.encode(turned)[:40], model.encode(packed)[:40], atol=1e-2)


@CONFIGS
def test_dropout_is_in_training_alone_and_follows_the_phase(config: DebertaConfig, sequences: Make, pack: Make) -> None:
    model = build(replace(config, dropout=0.1))
    packed = pack([sequences([40])], row_tokens=50).packed
    still = model.encode(packed)
    assert torch.equal(model.encode(packed), still)
    model.train()
    assert not torch.equal(model.encode(packed), still)
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.1] * (1 + 3 * config.num_layers + bool(config.convolution))
    model.set_phase(config)
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


@CONFIGS
def test_recomputation_gives_the_same_gradients(config: DebertaConfig, sequences: Make, pack: Make) -> None:
    packed = pack([sequences([40, 12])], row_tokens=60).packed
    gradients = []
    for recompute in (False, True):
        model = build(config, activation_checkpointing=recompute)
        model.encode(packed).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert one is not None and two is not None and torch.equal(one, two)


def test_a_kernel_without_a_bias_is_refused() -> None:
    """It would leave out where tokens stand; on a login node `check` says so."""
    with pytest.raises(ConfigError, match=r"compute\.attention=flex: .*Usable here: sdpa"):
        build(attention="flex").encode(lay_out(ids(8), [0, 8]))


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 184_551_780),
        ({"num_layers": 6}, 142_024_548),
        ({"hidden_size": 384, "num_heads": 6, "intermediate_size": 1536}, 70_958_820),
        (LARGE, 435_191_908),
        (
            {"hidden_size": 1536, "num_layers": 24, "num_heads": 24, "intermediate_size": 6144, "convolution": 3},
            887_085_156,
        ),
        ({"version": "v1", "vocab_size": 50265, "buckets": 512}, 139_244_121),
    ],
    ids=["base", "small", "xsmall", "large", "v2-xlarge", "v1 base"],
)
def test_counts_are_the_published_models(changes: dict[str, Any], total: int) -> None:
    """By arithmetic alone, of our model and of transformers', which share no code."""
    config = DebertaConfig(**changes)
    with torch.device("meta"):
        model = build_model(config, MaskedLmConfig())
        settings = describe(config, "all", {"model", "head", "decoder"}, 512, VOCABULARY)
        first = config.version == "v1"
        kind: Any = transformers.DebertaForMaskedLM if first else transformers.DebertaV2ForMaskedLM
        twin = kind((transformers.DebertaConfig if first else transformers.DebertaV2Config)(**settings))
    counts, encoder = planned.count_parameters(config), model.model
    assert isinstance(encoder, Deberta)
    assert counts.total == total == count_parameters(model) == sum(p.numel() for p in twin.parameters())
    assert counts.layers == sum(parameter.numel() for parameter in encoder.layers.parameters())
    assert counts.layer == sum(parameter.numel() for parameter in encoder.layers[0].parameters())
    assert counts.embedding == encoder.embedding().numel()
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert counts.hidden == sum(matrix.numel() for matrix in matrices) - encoder.embedding().numel()
