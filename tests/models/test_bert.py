"""BERT and RoBERTa against transformers': what is trained here must be what users load there."""

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
from modernbert_train.config.bert import BertConfig
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.models import bert
from modernbert_train.models.bert import BertForMaskedLM
from modernbert_train.models.init import count_parameters, initialize
from modernbert_train.models.pairs import PairHead
from modernbert_train.plan import parameters as planned
from modernbert_train.weights.formats import bert as bert_format
from modernbert_train.weights.formats.bert import PAIR_HEAD
from modernbert_train.weights.formats.tensors import to_hf
from tests.models.test_training import first_predictions, opaque_attention

Make = Callable[..., Any]
LENGTHS = [300, 1, 64, 128, 129, 65]  # in rows of 352 that hold 301, 321 and 65 tokens: each has a tail of pads
STARTS = [0, 300, 352, 416, 544, 704]
PAD = 1

SMALL = BertConfig(
    vocab_size=160, hidden_size=64, num_layers=3, num_heads=2, intermediate_size=96, max_positions=400, init_std=0.1
)
SMALL_ROBERTA = replace(SMALL, segments=1, position_offset=PAD + 1, norm_eps=1e-5)
LARGE = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096}
ROBERTA = {"vocab_size": 50265, "segments": 1, "position_offset": 2, "norm_eps": 1e-5}

HIDDEN_ACT = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
TIED = {f"{head}.decoder.{end}" for head in ("cls.predictions", "lm_head") for end in ("weight", "bias")}


def fill(module: nn.Module, config: BertConfig) -> None:
    """Weights large enough for attention to matter, norms and biases that parity could miss at one and zero."""
    initialize(module, config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)


def build(config: BertConfig, **compute: Any) -> BertForMaskedLM:
    model = BertForMaskedLM(config, ComputeConfig(attention="sdpa", **compute))
    fill(model, config)
    return model.eval()


def twin_of(model: BertForMaskedLM, kind: type, pair_head: PairHead | None = None, device: str = "cpu") -> Any:
    """transformers' model with the same weights, its configuration written by hand."""
    config = model.config
    settings = transformers.RobertaConfig if kind is transformers.RobertaForMaskedLM else transformers.BertConfig
    with torch.device(device):
        twin = kind(
            settings(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                intermediate_size=config.intermediate_size,
                max_position_embeddings=config.max_positions + config.position_offset,
                type_vocab_size=config.segments,
                hidden_act=HIDDEN_ACT[config.activation],
                layer_norm_eps=config.norm_eps,
                pad_token_id=PAD,
                attn_implementation="eager",
            )
        )
    if device == "meta":  # for its shapes alone
        return twin
    weights = dict(model.state_dict())
    if pair_head is not None:
        weights |= {f"{PAIR_HEAD}.{name}": tensor for name, tensor in pair_head.state_dict().items()}
    missing, unexpected = twin.load_state_dict(to_hf(bert_format, weights, config), strict=False)
    assert set(missing) <= TIED and not unexpected
    return twin.eval()


def padded(sequences: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


def rows_of(sequences: list[Tensor]) -> list[list[Tensor]]:
    return [sequences[:2], sequences[2:5], sequences[5:]]


def assert_same_gradients(ours: dict[str, Tensor], config: BertConfig, twin: nn.Module) -> None:
    theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
    translated = to_hf(bert_format, ours, config)
    assert theirs.keys() == translated.keys()
    for name, expected in theirs.items():
        assert expected is not None
        # a key's bias shifts all scores of a query alike: its gradient is 0 but for rounding
        floor = 1e-5 if name.endswith("key.bias") else 0.0
        assert (translated[name] - expected).norm() <= 1e-4 * expected.norm() + floor, name


@pytest.mark.runs
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (transformers.BertForMaskedLM, SMALL),
        (transformers.BertForMaskedLM, replace(SMALL, activation="gelu_tanh")),
        (transformers.BertForPreTraining, SMALL),
        (transformers.BertForPreTraining, replace(SMALL, activation="gelu_tanh")),
        (transformers.RobertaForMaskedLM, SMALL_ROBERTA),  # whose head has the exact GELU alone
    ],
    ids=lambda value: value.activation if isinstance(value, BertConfig) else value.__name__,
)
def test_packed_rows_equal_transformers_sequence_by_sequence(
    sequences: Make, pack: Make, kind: type, config: BertConfig
) -> None:
    """Hidden states, logits, loss, and all gradients of masked-language modelling."""
    model = build(config)
    pair_head = None
    if kind is transformers.BertForPreTraining:
        pair_head = PairHead(config.hidden_size)
        fill(pair_head, config)
    twin = twin_of(model, kind, pair_head)
    apart = sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)

    mask = padded([torch.ones(len(ids)) for ids in apart], 0)
    out = twin(input_ids=padded(apart, PAD), attention_mask=mask, output_hidden_states=True)
    hidden_TD = model.encode(batch.packed)
    for index, start in enumerate(STARTS):
        expected = out.hidden_states[-1][index, : LENGTHS[index]]
        torch.testing.assert_close(hidden_TD[start : start + len(expected)], expected, atol=1e-5, rtol=0)
    logits = out.prediction_logits if pair_head is not None else out.logits
    logits = torch.cat([logits[index, :length:3] for index, length in enumerate(LENGTHS)])
    loss = F.cross_entropy(logits, torch.cat([ids[::3] for ids in apart]))

    chunked, plain = mean_loss(model, batch), mean_loss(model, batch, figures=True)
    torch.testing.assert_close(all_logits(model, batch)[: batch.counts["mlm"]], logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(plain, loss, atol=1e-6, rtol=0)
    torch.testing.assert_close(chunked, loss, atol=1e-6, rtol=0)
    if pair_head is None:
        chunked.backward()
        loss.backward()
        ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        assert_same_gradients(ours, config, twin)


@pytest.mark.runs
def test_pairs_equal_bert_for_pretraining(sequences: Make, pack: Make) -> None:
    """Segments, pooler and the pair's two classes: values, and gradients of both losses together."""
    model, pair_head = build(SMALL), PairHead(SMALL.hidden_size)
    fill(pair_head, SMALL)
    twin = twin_of(model, transformers.BertForPreTraining, pair_head)
    apart = sequences(LENGTHS)
    batch = pack(rows_of(apart), row_tokens=352)
    segments = [(torch.arange(len(ids)) >= len(ids) // 3).long() for ids in apart]
    segment_ids_T = torch.zeros_like(batch.packed.input_ids_T)
    for start, own in zip(STARTS, segments, strict=True):
        segment_ids_T[start : start + len(own)] = own
    pair_labels = torch.tensor([0, 1, 1, 0, 1, 0])

    hidden_TD = model.encode(replace(batch.packed, segment_ids_T=segment_ids_T))
    positions, labels = (batch.targets[name][: batch.counts["mlm"]] for name in ("positions_M", "labels_M"))
    logits_MV, pair_logits_P2 = model.logits(hidden_TD, positions), pair_head(hidden_TD[STARTS])
    out = twin(
        input_ids=padded(apart, PAD),
        attention_mask=padded([torch.ones(len(ids)) for ids in apart], 0),
        token_type_ids=padded(segments, 0),
    )
    logits = torch.cat([out.prediction_logits[index, :length:3] for index, length in enumerate(LENGTHS)])
    torch.testing.assert_close(logits_MV, logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(pair_logits_P2, out.seq_relationship_logits, atol=1e-5, rtol=0)
    assert not torch.allclose(model.encode(batch.packed), hidden_TD, atol=1e-2), "segments do nothing"

    (F.cross_entropy(logits_MV, labels) + F.cross_entropy(pair_logits_P2, pair_labels)).backward()
    (F.cross_entropy(logits, labels) + F.cross_entropy(out.seq_relationship_logits, pair_labels)).backward()
    modules = {"": model, f"{PAIR_HEAD}.": pair_head}
    ours = {f"{start}{name}": p.grad for start, module in modules.items() for name, p in module.named_parameters()}
    assert_same_gradients(ours, SMALL, twin)


def test_one_segment_is_the_first(sequences: Make, pack: Make) -> None:
    """An objective without pairs and one whose texts are all first segments must train the same."""
    model = build(SMALL)
    packed = pack([sequences([40])], row_tokens=50).packed
    zeros = torch.zeros_like(packed.input_ids_T)
    assert torch.equal(model.encode(packed), model.encode(replace(packed, segment_ids_T=zeros)))


def test_the_offset_moves_the_rows_of_positions(sequences: Make, pack: Make) -> None:
    """RoBERTa's first token has row 2; rows before it are kept, so that import and export lose nothing."""
    batch = pack([sequences([40])], row_tokens=40)
    roberta, plain = build(SMALL_ROBERTA), build(replace(SMALL_ROBERTA, position_offset=0))
    state = roberta.state_dict()
    state["model.embeddings.position_embeddings.weight"] = state["model.embeddings.position_embeddings.weight"][2:]
    plain.load_state_dict(state)
    assert torch.equal(roberta.encode(batch.packed), plain.encode(batch.packed))
    mean_loss(roberta, batch).backward()
    gradient = roberta.model.embeddings.position_embeddings.weight.grad
    assert gradient is not None and gradient.any(dim=1).nonzero().flatten().tolist() == list(range(2, 42))


def test_the_two_gelus_differ(sequences: Make, pack: Make) -> None:
    """By little: a model that is read with the wrong one seems to work."""
    batch = pack([sequences([40])], row_tokens=40)
    erf, tanh = (build(replace(SMALL, activation=name)).encode(batch.packed) for name in ("gelu", "gelu_tanh"))
    assert 1e-5 < (erf - tanh).abs().max() < 1e-1


def test_a_document_does_not_change_its_neighbours(sequences: Make, pack: Make) -> None:
    """Hidden states of a packed document are bit for bit those beside any other document."""
    model = build(SMALL)
    a, b, c = sequences([70, 50, 60])
    with torch.no_grad():
        one = model.encode(pack([[a, b], [c]], row_tokens=130).packed)
        other = model.encode(pack([[a, b.flip(0)], [c]], row_tokens=130).packed)
    assert torch.equal(one[:70], other[:70]) and torch.equal(one[130:], other[130:])
    assert not torch.equal(one[70:120], other[70:120])


@pytest.mark.parametrize("spare", [0, 4])
def test_no_label_gives_zero_loss_and_zero_gradients(sequences: Make, pack: Make, spare: int) -> None:
    model = build(SMALL)
    loss = model(pack([sequences([20, 3])], row_tokens=30, predict_every=0, spare=spare)).losses["mlm"]
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_the_row_of_pad_gets_no_gradient_as_an_input(sequences: Make, pack: Make) -> None:
    """transformers masks that gradient; here it is 0 because pads are never predicted nor seen. The decoder's stays."""
    model = build(SMALL)
    batch = pack([sequences([20])], row_tokens=30)
    with torch.no_grad():
        model.decoder.weight = nn.Parameter(model.decoder.weight.clone())  # untied, to see the input's alone
    mean_loss(model, batch).backward()
    gradient_VD = model.model.embedding().grad
    assert gradient_VD is not None and gradient_VD.any() and not gradient_VD[PAD].any()


def test_recomputation_changes_no_gradient(sequences: Make, pack: Make) -> None:
    """It buys memory with time; dropout is drawn again as it was."""
    batch = pack([sequences([40, 9])], row_tokens=50)
    gradients = []
    for recompute in (False, True):
        model = build(SMALL, activation_checkpointing=recompute).train()
        torch.manual_seed(0)
        mean_loss(model, batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_bf16_autocast_trains_near_fp32(sequences: Make, pack: Make) -> None:
    """The precision of real runs: fp32 sums of the loss, fp32 gradients, and no other function."""
    model = build(SMALL)
    batch = pack([sequences([100, 30])], row_tokens=140)
    expected = mean_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(model, batch)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=0.02)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.runs
def test_layers_compile_once_whatever_the_documents(
    monkeypatch: pytest.MonkeyPatch, sequences: Make, pack: Make
) -> None:
    """All layers are one graph, and the loss another, however many documents share the buffer."""
    torch._dynamo.reset()
    counters.clear()
    kernel = opaque_attention()
    monkeypatch.setattr(bert, "choose_kernel", lambda *_, **__: kernel)
    model = build(SMALL).train()
    model.compile_layers(backend="aot_eager")
    compiled = []
    for lengths in ([96], [50, 20], [1, 2, 3, 90], [3] * 30):
        batch = pack([sequences(lengths)], row_tokens=96)
        mean_loss(model, first_predictions(batch, 16)).backward()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [2] * 4


def test_dropout_is_that_of_the_phase_and_acts_in_training_only(sequences: Make, pack: Make) -> None:
    """After the embeddings, and after both parts of each layer: transformers' places, but not the probabilities."""
    model = build(SMALL)
    packed = pack([sequences([50])], row_tokens=50).packed
    still = model.encode(packed)
    assert torch.equal(model.encode(packed), still)
    model.train()
    assert not torch.equal(model.encode(packed), model.encode(packed))
    rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.1] * (1 + 2 * SMALL.num_layers)
    model.set_phase(replace(SMALL, dropout=0.0))
    assert torch.equal(model.encode(packed), still)


def test_in_causal_order_no_token_sees_a_later_one(sequences: Make, pack: Make) -> None:
    """All layers are global: each token sees its sequence up to itself, and nothing of the one before."""
    model = build(SMALL)
    a, b = sequences([30, 50])
    other = torch.cat([b[:20], b[20:].flip(0)])
    with torch.no_grad():
        one, two = (model.encode(replace(pack([[a, end]], row_tokens=90).packed, order="causal")) for end in (b, other))
        alone = model.encode(replace(pack([[b]], row_tokens=50).packed, order="causal"))
        whole = model.encode(pack([[b]], row_tokens=50).packed)
    assert torch.equal(one[:50], two[:50]) and not torch.allclose(one[50:80], two[50:80], atol=1e-2)
    torch.testing.assert_close(one[30:80], alone, atol=1e-5, rtol=0)
    assert not torch.allclose(alone[:49], whole[:49], atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen": 401}, r"up to 401 tokens, but model\.max_positions=400\. Shorten"),
        ({"segment_ids_T": torch.zeros(8, dtype=torch.int64)}, r"makes pairs, but model\.segments=1\. Set"),
    ],
)
def test_what_the_encoder_cannot_read_is_refused(changes: dict[str, Any], message: str) -> None:
    """On a GPU an index beyond a table ends the process with words that nobody understands."""
    packed = lay_out(torch.arange(8), [0, 8])
    with pytest.raises(ValueError, match=message):
        build(replace(SMALL, segments=1)).encode(replace(packed, **changes))


def test_initial_weights_are_googles() -> None:
    """Truncated normal of one deviation for every matrix, the output projections too; biases zero, norms one."""
    config = BertConfig(vocab_size=1024, hidden_size=256, num_layers=2, num_heads=4, intermediate_size=384)
    model = BertForMaskedLM(config)
    initialize(model, config, seed=17)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
        elif len(parameter) > 2:
            assert parameter.std().item() == pytest.approx(0.8796 * 0.02, rel=0.02), name  # truncated at 2
            assert parameter.abs().max().item() <= 0.04, name


@pytest.mark.parametrize(
    ("changes", "kind", "total"),
    [
        ({}, transformers.BertForMaskedLM, 109_514_298),
        (LARGE, transformers.BertForMaskedLM, 335_174_458),
        (ROBERTA, transformers.RobertaForMaskedLM, 124_697_433),
        (ROBERTA | LARGE, transformers.RobertaForMaskedLM, 355_412_057),
    ],
    ids=["bert-base", "bert-large", "roberta-base", "roberta-large"],
)
def test_counts_are_the_published_models(changes: dict[str, Any], kind: type, total: int) -> None:
    """By arithmetic alone, of our model and of transformers', which share no code."""
    config = BertConfig(**changes)
    with torch.device("meta"):
        model = BertForMaskedLM(config)
    counts = planned.count_parameters(config)
    assert counts.total == total == count_parameters(model)
    assert counts.layers == sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert counts.layer == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert counts.embedding == model.model.embedding().numel()
    tables = (model.model.embeddings.position_embeddings, model.model.embeddings.segment_embeddings)
    looked_up = sum(table.weight.numel() for table in tables)
    assert counts.matrices == sum(p.numel() for p in model.parameters() if p.dim() == 2) - looked_up
    assert sum(parameter.numel() for parameter in twin_of(model, kind, device="meta").parameters()) == total


def test_the_pair_head_makes_it_bert_for_pretraining() -> None:
    with torch.device("meta"):
        head = PairHead(BertConfig().hidden_size)
        theirs = transformers.BertForPreTraining(transformers.BertConfig())
    total = sum(parameter.numel() for parameter in theirs.parameters())
    assert planned.count_parameters(BertConfig()).total + count_parameters(head) == total == 110_106_428
