"""ALBERT against transformers': what is trained here must be what users load there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.batches import all_logits, lay_out, mean_loss
from modernbert_train.batch import Batch
from modernbert_train.config.albert import AlbertConfig
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.models import albert
from modernbert_train.models.albert import AlbertForMaskedLM, Attention, FeedForward
from modernbert_train.models.init import initialize
from modernbert_train.models.pairs import PairHead
from modernbert_train.weights.formats import albert as albert_format
from modernbert_train.weights.formats.albert import PAIR_HEAD
from modernbert_train.weights.formats.tensors import places_of, to_hf
from tests.models.test_training import first_predictions, opaque_attention

Make = Callable[..., Any]
LENGTHS = [300, 1, 64, 128, 129, 65]  # in rows of 352 that hold 301, 321 and 65 tokens: each has a tail of pads
STARTS = [0, 300, 352, 416, 544, 704]
PAD = 1

SMALL = AlbertConfig(
    vocab_size=160, embedding_size=24, hidden_size=64, num_layers=4, num_heads=2, intermediate_size=96,
    max_positions=400, init_std=0.1,
)  # fmt: skip
GROUPS = replace(SMALL, groups=2)
INNER = replace(SMALL, group_layers=2)
BOTH = replace(SMALL, groups=2, group_layers=2, num_layers=8)
WAYS = {
    "all": SMALL,
    "exact gelu": replace(SMALL, activation="gelu"),
    "groups": GROUPS,
    "turns": INNER,
    "groups and turns": BOTH,
    "attention": replace(SMALL, sharing="attention"),
    "ffn": replace(SMALL, sharing="ffn"),
    "ffn in groups": replace(SMALL, sharing="ffn", groups=2),
    "none": replace(SMALL, sharing="none"),
}
HIDDEN_ACT = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
TIED = {"predictions.decoder.weight", "predictions.decoder.bias"}


def fill(module: nn.Module, config: AlbertConfig) -> None:
    """Weights large enough for attention to matter, norms and biases that parity could miss at one and zero."""
    initialize(module, config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)


def build(config: AlbertConfig, **compute: Any) -> AlbertForMaskedLM:
    model = AlbertForMaskedLM(config, ComputeConfig(attention="sdpa", **compute))
    fill(model, config)
    return model.eval()


def groups_there(config: AlbertConfig) -> tuple[int, int, int]:
    """num_hidden_layers, num_hidden_groups and inner_group_num, worked out by hand."""
    if config.sharing == "all":
        return config.num_layers // config.group_layers, config.groups, config.group_layers
    return config.num_layers, config.num_layers, 1


def twin_of(model: AlbertForMaskedLM, kind: type, pair_head: PairHead | None = None) -> Any:
    """transformers' model with the same weights, its configuration written by hand."""
    config = model.config
    layers, groups, inner = groups_there(config)
    twin = kind(
        transformers.AlbertConfig(
            vocab_size=config.vocab_size,
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=layers,
            num_hidden_groups=groups,
            inner_group_num=inner,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_positions,
            type_vocab_size=config.segments,
            hidden_act=HIDDEN_ACT[config.activation],
            layer_norm_eps=config.norm_eps,
            hidden_dropout_prob=config.dropout,
            classifier_dropout_prob=0.0,
            pad_token_id=PAD,
            attn_implementation="eager",
        )
    )
    weights = dict(model.state_dict())
    if pair_head is not None:
        weights |= {f"{PAIR_HEAD}.{name}": tensor for name, tensor in pair_head.state_dict().items()}
    missing, unexpected = twin.load_state_dict(to_hf(albert_format, weights, config), strict=False)
    assert set(missing) <= TIED and not unexpected
    return twin.eval()


def padded(sequences: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def rows_of(sequences: list[Tensor]) -> list[list[Tensor]]:
    return [sequences[:2], sequences[2:5], sequences[5:]]


def assert_same_gradients(ours: dict[str, Tensor], config: AlbertConfig, twin: nn.Module) -> None:
    """Of what is one tensor here and several equal ones there, theirs add up to ours."""
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    seen: set[str] = set()
    for name, gradient in ours.items():
        places = places_of(albert_format, name, config)
        for numbered, part in enumerate(gradient.chunk(len(places[0]))):
            names = [place[numbered] for place in places]
            expected = torch.stack([theirs[each] for each in names]).sum(0)
            # a key's bias shifts all scores of a query alike: its gradient is 0 but for rounding
            floor = 1e-5 if names[0].endswith("key.bias") else 0.0
            assert (part - expected).norm() <= 1e-4 * expected.norm() + floor, name
            seen.update(names)
    assert seen == theirs.keys()


@pytest.mark.runs
@pytest.mark.parametrize("way", WAYS)
def test_packed_rows_equal_transformers_sequence_by_sequence(sequences: Make, pack: Make, way: str) -> None:
    """Hidden states, logits, loss and all gradients of masked-language modelling, whatever layers share."""
    config = WAYS[way]
    model = build(config)
    twin = twin_of(model, transformers.AlbertForMaskedLM)
    apart = sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)

    mask = padded([torch.ones(len(ids)) for ids in apart], 0)
    out = twin(input_ids=padded(apart, PAD), attention_mask=mask, output_hidden_states=True)
    hidden_TD = model.encode(batch.packed)
    for index, start in enumerate(STARTS):
        expected = out.hidden_states[-1][index, : LENGTHS[index]]
        torch.testing.assert_close(hidden_TD[start : start + len(expected)], expected, atol=1e-5, rtol=0)
    logits = torch.cat([out.logits[index, :length:3] for index, length in enumerate(LENGTHS)])
    loss = F.cross_entropy(logits, torch.cat([ids[::3] for ids in apart]))

    chunked, plain = mean_loss(model, batch), mean_loss(model, batch, figures=True)
    torch.testing.assert_close(all_logits(model, batch)[: batch.counts["mlm"]], logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(plain, loss, atol=5e-6, rtol=0)
    torch.testing.assert_close(chunked, loss, atol=5e-6, rtol=0)
    chunked.backward()
    loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_gradients(ours, config, twin)


def test_pairs_equal_albert_for_pretraining(sequences: Make, pack: Make) -> None:
    """Segments, pooler and the two classes of the order: values, and gradients of both losses together."""
    model, pair_head = build(SMALL), PairHead(SMALL.hidden_size)
    fill(pair_head, SMALL)
    twin = twin_of(model, transformers.AlbertForPreTraining, pair_head)
    apart = sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)
    segments = [(torch.arange(len(ids)) >= len(ids) // 3).long() for ids in apart]
    segment_ids_T = torch.zeros_like(batch.packed.input_ids_T)
    for start, own in zip(STARTS, segments, strict=True):
        segment_ids_T[start : start + len(own)] = own
    swapped = torch.tensor([0, 1, 1, 0, 1, 0])

    hidden_TD = model.encode(replace(batch.packed, segment_ids_T=segment_ids_T))
    positions, labels = (batch.targets[name][: batch.counts["mlm"]] for name in ("positions_M", "labels_M"))
    logits_MV, pair_logits_P2 = model.logits(hidden_TD, positions), pair_head(hidden_TD[STARTS])
    labels_there = padded([ids.where(torch.arange(len(ids)) % 3 == 0, -100) for ids in apart], -100)
    out = twin(
        input_ids=padded(apart, PAD),
        attention_mask=padded([torch.ones(len(ids)) for ids in apart], 0),
        token_type_ids=padded(segments, 0),
        labels=labels_there,
        sentence_order_label=swapped,
    )
    logits = torch.cat([out.prediction_logits[index, :length:3] for index, length in enumerate(LENGTHS)])
    torch.testing.assert_close(logits_MV, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(pair_logits_P2, out.sop_logits, atol=1e-5, rtol=0)
    assert not torch.allclose(model.encode(batch.packed), hidden_TD, atol=1e-2), "segments do nothing"

    loss = F.cross_entropy(logits_MV, labels) + F.cross_entropy(pair_logits_P2, swapped)
    torch.testing.assert_close(loss, out.loss, atol=5e-6, rtol=0)
    loss.backward()
    out.loss.backward()
    modules = {"": model, f"{PAIR_HEAD}.": pair_head}
    ours = {f"{start}{name}": p.grad for start, module in modules.items() for name, p in module.named_parameters()}
    assert_same_gradients(ours, SMALL, twin)


@pytest.mark.parametrize("way", WAYS)
def test_large_weights_in_fp64_leave_no_difference(sequences: Make, way: str) -> None:
    """Matrices of deviation 0.4 saturate attention and both GELUs, where fp32 rounds too coarsely to tell."""
    config = replace(WAYS[way], init_std=0.4)
    model, pair_head = build(config).double(), PairHead(config.hidden_size).double()
    twin = twin_of(model, transformers.AlbertForPreTraining, pair_head).double()
    a, b = sequences([70, 41])
    with torch.no_grad():
        hidden_TD = model.encode(lay_out(torch.cat([a, b]), [0, 70, 111]))
        for ids, start in ((a, 0), (b, 70)):
            out, own = twin(ids[None], output_hidden_states=True), hidden_TD[start : start + len(ids)]
            torch.testing.assert_close(own, out.hidden_states[-1][0], atol=1e-10, rtol=0)
            logits = model.logits(own, torch.arange(len(ids)))
            torch.testing.assert_close(logits, out.prediction_logits[0], atol=1e-10, rtol=0)
            torch.testing.assert_close(pair_head(own[0]), out.sop_logits[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("way", ["all", "groups and turns", "attention", "ffn in groups"])
def test_sharing_is_equal_weights(sequences: Make, pack: Make, way: str) -> None:
    """A model that shares nothing, with the weights of one that does in each layer, computes the same."""
    config = WAYS[way]
    batch, shared = pack([sequences([40, 9])], row_tokens=50), build(config)
    apart = build(replace(config, sharing="none", groups=1, group_layers=1))
    weights = shared.state_dict()
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.")}
    apart.load_state_dict(weights, strict=False)
    for units, others in zip(apart.config.path, shared.config.path, strict=True):
        for unit, other in zip(units, others, strict=True):
            apart.model.layers[unit].load_state_dict(shared.model.layers[other].state_dict())
    assert torch.equal(apart.encode(batch.packed), shared.encode(batch.packed))


@pytest.mark.parametrize(
    ("config", "attention", "ffn"),
    [
        (SMALL, (0, 0, 0, 0), (0, 0, 0, 0)),
        (GROUPS, (0, 0, 1, 1), (0, 0, 1, 1)),
        (INNER, (0, 1, 0, 1), (0, 1, 0, 1)),
        (BOTH, (0, 1, 0, 1, 2, 3, 2, 3), (0, 1, 0, 1, 2, 3, 2, 3)),
        (replace(SMALL, sharing="attention"), (0, 0, 0, 0), (0, 1, 2, 3)),
        (replace(SMALL, sharing="ffn", groups=2), (0, 1, 2, 3), (0, 0, 1, 1)),
        (replace(SMALL, sharing="none"), (0, 1, 2, 3), (0, 1, 2, 3)),
    ],
)
def test_which_layers_share_by_hand(config: AlbertConfig, attention: tuple[int, ...], ffn: tuple[int, ...]) -> None:
    assert (config.weights_of("attention"), config.weights_of("ffn")) == (attention, ffn)
    with torch.device("meta"):
        units = AlbertForMaskedLM(config).model.layers
    kinds = [type(unit) for unit in units]
    assert kinds == [Attention] * (max(attention) + 1) + [FeedForward] * (max(ffn) + 1)
    assert len(config.unit_passes) == len(units) and sum(config.unit_passes) == 2 * config.num_layers


def test_one_segment_is_the_first(sequences: Make, pack: Make) -> None:
    """An objective without pairs and one whose texts are all first segments must train the same."""
    model = build(SMALL)
    packed = pack([sequences([40])], row_tokens=50).packed
    zeros = torch.zeros_like(packed.input_ids_T)
    assert torch.equal(model.encode(packed), model.encode(replace(packed, segment_ids_T=zeros)))


def test_a_document_does_not_change_its_neighbours(sequences: Make, pack: Make) -> None:
    """Hidden states of a packed document are bit for bit those beside any other document."""
    model = build(SMALL)
    a, b, c = sequences([70, 50, 60])
    with torch.no_grad():
        one = model.encode(pack([[a, b], [c]], row_tokens=130).packed)
        other = model.encode(pack([[a, b.flip(0)], [c]], row_tokens=130).packed)
    assert torch.equal(one[:70], other[:70]) and torch.equal(one[130:], other[130:])
    assert not torch.equal(one[70:120], other[70:120])


def test_in_causal_order_no_token_sees_a_later_one(sequences: Make, pack: Make) -> None:
    model = build(SMALL)
    a, b = sequences([30, 50])
    other = torch.cat([b[:20], b[20:].flip(0)])
    with torch.no_grad():
        one, two = (model.encode(replace(pack([[a, end]], row_tokens=90).packed, order="causal")) for end in (b, other))
        alone = model.encode(replace(pack([[b]], row_tokens=50).packed, order="causal"))
    assert torch.equal(one[:50], two[:50]) and not torch.allclose(one[50:80], two[50:80], atol=1e-2)
    torch.testing.assert_close(one[30:80], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spare", [0, 4])
def test_no_label_gives_zero_loss_and_zero_gradients(sequences: Make, pack: Make, spare: int) -> None:
    model = build(SMALL)
    loss = model(pack([sequences([20, 3])], row_tokens=30, predict_every=0, spare=spare)).losses["mlm"]
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("way", ["all", "ffn"])
def test_recomputation_changes_no_gradient(sequences: Make, pack: Make, way: str) -> None:
    """It buys memory with time; the dropout of every pass through a shared layer is drawn again as it was."""
    batch = pack([sequences([40, 9])], row_tokens=50)
    gradients = []
    for recompute in (False, True):
        model = build(replace(WAYS[way], dropout=0.2), activation_checkpointing=recompute).train()
        torch.manual_seed(0)
        mean_loss(model, batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def passes_of(model: AlbertForMaskedLM, batch: Batch) -> list[Tensor]:
    """What is dropped in each pass through the attention that all layers share: its dropout is given ones."""
    dropped: list[Tensor] = []
    unit = model.model.layers[0]
    assert isinstance(unit, Attention)
    plain = unit.dropout.forward
    unit.dropout.forward = lambda x: dropped.append(plain(torch.ones_like(x)) == 0) or plain(x)  # type: ignore[method-assign, func-returns-value]
    model.encode(batch.packed)
    return dropped


def test_every_pass_through_a_shared_layer_drops_other_numbers(sequences: Make, pack: Make) -> None:
    """The same numbers in all layers would be another regularisation. They follow from the generator alone, which a
    step keys by (seed, step, microbatch)."""
    batch = pack([sequences([50])], row_tokens=50)
    runs = []
    for _ in range(2):
        model = build(replace(SMALL, dropout=0.5)).train()
        torch.manual_seed(7)
        runs.append(passes_of(model, batch))
    assert len(runs[0]) == SMALL.num_layers
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    for first in range(SMALL.num_layers):
        for second in range(first):
            alike = (runs[0][first] == runs[0][second]).float().mean().item()
            assert alike == pytest.approx(0.5, abs=0.05)


def test_dropout_is_transformers_but_for_the_probabilities(sequences: Make, pack: Make) -> None:
    """After the embeddings and each attention, not after the feed-forward; a phase may change it."""
    model = build(replace(SMALL, dropout=0.1))
    packed = pack([sequences([50])], row_tokens=50).packed
    still = model.encode(packed)
    model.train()
    assert not torch.equal(model.encode(packed), model.encode(packed))
    assert [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)] == [
        "model.embeddings.dropout",
        "model.layers.0.dropout",
    ]
    model.set_phase(SMALL)
    assert torch.equal(model.encode(packed), still)


def test_bf16_autocast_trains_near_fp32(sequences: Make, pack: Make) -> None:
    model = build(SMALL)
    batch = pack([sequences([100, 30])], row_tokens=140)
    expected = mean_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(model, batch)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=0.02)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.runs
@pytest.mark.parametrize("way", ["all", "ffn"])
@pytest.mark.parametrize("recompute", [False, True])
def test_units_compile_once_whatever_the_documents(
    monkeypatch: pytest.MonkeyPatch, sequences: Make, pack: Make, way: str, recompute: bool
) -> None:
    """Attention is one graph, feed-forward one, the loss another, however often they are passed; and compiled they
    compute the same, gradients of shared weights too."""
    torch._dynamo.reset()
    counters.clear()
    kernel = opaque_attention()
    monkeypatch.setattr(albert, "choose_kernel", lambda *_, **__: kernel)
    plain, model = (build(WAYS[way], activation_checkpointing=recompute).train() for _ in range(2))
    model.compile_layers(backend="aot_eager")
    compiled = []
    for lengths in ([96], [50, 20], [1, 2, 3, 90], [3] * 30):
        batch = first_predictions(pack([sequences(lengths)], row_tokens=96), 16)
        for each in (plain, model):
            each.zero_grad()
            mean_loss(each, batch).backward()
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [3] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen": 401}, r"up to 401 tokens, but model\.max_positions=400\. Shorten"),
        ({"segment_ids_T": torch.zeros(8, dtype=torch.int64)}, r"makes pairs, but model\.segments=1\. Set"),
    ],
)
def test_what_the_encoder_cannot_read_is_refused(changes: dict[str, Any], message: str) -> None:
    packed = lay_out(torch.arange(8), [0, 8])
    with pytest.raises(ValueError, match=message):
        build(replace(SMALL, segments=1)).encode(replace(packed, **changes))
