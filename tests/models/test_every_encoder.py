"""Requirements of every encoder: no document sees another, and switches change speed or memory alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.batches import all_logits, lay_out, mean_loss
from modernbert_train.batch import Batch
from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DebertaConfig,
    DistilBertConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
    XLNetConfig,
)
from modernbert_train.errors import ConfigError
from modernbert_train.models import attention
from modernbert_train.models.albert import AlbertForMaskedLM, Attention, FeedForward
from modernbert_train.models.build import build_model
from modernbert_train.models.init import count_parameters
from modernbert_train.plan import parameters as planned
from tests.support.attention import WAYS
from tests.support.encoder_training import first_predictions, opaque_attention, pack, sequences
from tests.support.encoders import ALBERT, ENCODERS, LLAMAS, build, empty_twin, ids, objective_of, with_dropout

EVERY = pytest.mark.parametrize("name", ENCODERS)
BY_DISTANCE = pytest.mark.parametrize("name", ["xlnet", "deberta"])  # their biases do not read positions
OF_PAIRS = ("bert", "albert")


@EVERY
@torch.no_grad()
def test_a_document_is_read_as_if_alone(name: str) -> None:
    """For rows of any length; and its states are bit for bit the same next to any other document of that length."""
    model = build(ENCODERS[name])
    a, b, c = sequences([40, 50, 7])
    one = model.encode(pack([[a, b], [c]], row_tokens=95).packed)
    other = model.encode(pack([[a, b.flip(0)], [c]], row_tokens=95).packed)
    assert torch.equal(one[:40], other[:40]) and torch.equal(one[95:], other[95:])
    assert not torch.equal(one[40:90], other[40:90])
    for start, own in ((0, a), (40, b), (95, c)):
        alone = model.encode(pack([[own]], row_tokens=len(own)).packed)
        torch.testing.assert_close(one[start : start + len(own)], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name != "deberta, narrow"])  # its convolution is refused
@torch.no_grad()
def test_in_causal_order_no_token_sees_a_later_one(name: str) -> None:
    """Each sees its sequence up to itself, and nothing of the one before."""
    model = build(ENCODERS[name])
    a, b = sequences([30, 50])
    other = torch.cat([b[:20], b[20:].flip(0)])
    one, two = (model.encode(replace(pack([[a, end]], row_tokens=90).packed, order="causal")) for end in (b, other))
    alone = model.encode(replace(pack([[b]], row_tokens=50).packed, order="causal"))
    whole = model.encode(pack([[b]], row_tokens=50).packed)
    assert torch.equal(one[:50], two[:50]) and not torch.allclose(one[50:80], two[50:80], atol=1e-2)
    torch.testing.assert_close(one[30:80], alone[:50], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(alone[:49], whole[:49], atol=1e-2)


@pytest.mark.parametrize("name", OF_PAIRS)
def test_one_segment_is_the_first(name: str) -> None:
    """An objective without pairs and one whose texts are all first segments must train the same."""
    model = build(ENCODERS[name])
    packed = pack([sequences([40])], row_tokens=50).packed
    zeros = torch.zeros_like(packed.input_ids_T)
    assert torch.equal(model.encode(packed), model.encode(replace(packed, segment_ids_T=zeros)))


@EVERY
@pytest.mark.parametrize(("spare", "z_loss"), [(0, 0.0), (4, 1e-3)])
def test_no_label_gives_zero_loss_and_zero_gradients(name: str, spare: int, z_loss: float) -> None:
    """A microbatch without a masked token must not turn the whole step into NaN, nor skip a rank's backward pass."""
    model = build(ENCODERS[name])
    model.z_loss = z_loss
    loss = model(pack([sequences([20, 3])], row_tokens=30, predict_every=0, spare=spare)).losses["mlm"]
    assert loss.item() == 0.0 and loss.dtype == torch.float32
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@EVERY
def test_recomputation_changes_no_gradient(name: str) -> None:
    """It buys memory with time: every pass through a layer is computed twice, with the same dropout."""
    batch = pack([sequences([40, 9])], row_tokens=50)
    gradients, calls = [], []
    for recompute in (False, True):
        model = build(with_dropout(ENCODERS[name], 0.2), activation_checkpointing=recompute).train()
        first = next(each for each in model.model.layers.modules() if isinstance(each, nn.Linear))
        first.register_forward_pre_hook(lambda *_, recompute=recompute: calls.append(recompute))
        torch.manual_seed(0)
        mean_loss(model, batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0 and calls.count(True) == 2 * calls.count(False) > 0
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))


@EVERY
def test_bf16_autocast_stays_close_to_fp32(name: str) -> None:
    """The precision of real runs: products in bf16, fp32 sums of the loss, fp32 gradients, and no other function."""
    model = build(replace(ENCODERS[name], init_std=0.05))
    batch = pack([sequences([60, 20])], row_tokens=90)
    expected = mean_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits_MV = mean_loss(model, batch), all_logits(model, batch)
    assert loss.dtype == torch.float32 and logits_MV.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("name", "graphs", "recompute"),
    [
        pytest.param("modernbert", 8, False, marks=pytest.mark.slow),
        pytest.param("bert", 4, False, marks=pytest.mark.slow),
        pytest.param("albert", 5, False, marks=pytest.mark.slow),
        ("albert that shares its ffn", 5, True),
        pytest.param("xlnet", 5, False, marks=pytest.mark.slow),
        pytest.param("deberta", 6, False, marks=pytest.mark.slow),
        pytest.param("llama", 5, False, marks=pytest.mark.slow),
        pytest.param("neobert", 5, False, marks=pytest.mark.slow),
        pytest.param("esm", 6, False, marks=pytest.mark.slow),
    ],
)
def test_layers_compile_once_whatever_the_documents(
    name: str, graphs: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for each kind of layer, or layer that reads positions by itself, one for the loss, and one for each
    region outside the layers: embedding, rotary tables, final norm, head. Compiling again for other documents takes
    minutes each time. Compiled they compute the same, gradients of shared weights too."""
    torch._dynamo.reset()
    counters.clear()
    kernel = opaque_attention()
    if not ENCODERS[name].score_bias:
        monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)
    plain, model = (build(ENCODERS[name], activation_checkpointing=recompute).train() for _ in range(2))
    model.compile_layers(backend="aot_eager")
    compiled = []
    for lengths in ([96], [50, 20], [1, 2, 3, 90], [3] * 30, [33, 33, 30]):
        batch = first_predictions(pack([sequences(lengths)], row_tokens=96), 16)
        batch = replace(batch, packed=replace(batch.packed, longest=max(lengths)))
        for each in (plain, model):
            each.zero_grad()
            mean_loss(each, batch).backward()
        for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [graphs] * 5


@pytest.mark.parametrize(
    ("name", "places"),
    [("modernbert", 4), ("bert", 7), ("albert", 2), ("xlnet", 6), ("deberta", 7), ("deberta, narrow", 8)],
)
def test_dropout_is_that_of_the_phase_and_acts_in_training_only(name: str, places: int) -> None:
    """In as many places as transformers has, but for the probabilities of attention."""
    still_config, config = ENCODERS[name], with_dropout(ENCODERS[name], 0.1)
    model = build(config)
    packed = pack([sequences([50])], row_tokens=50).packed
    still = model.encode(packed)
    assert torch.equal(model.encode(packed), still)
    model.train()
    assert not torch.equal(model.encode(packed), model.encode(packed))
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.1] * places
    model.set_phase(still_config)
    assert torch.equal(model.encode(packed), still) is (name != "modernbert"), "its dropout is of the whole run"


@BY_DISTANCE
def test_a_kernel_without_a_bias_is_refused(name: str) -> None:
    """It would ignore where tokens are; on a login node `check` reports it."""
    with pytest.raises(ConfigError, match=r"compute\.attention=flex: .*Usable here: sdpa"):
        build(ENCODERS[name], attention="flex").encode(lay_out(ids(8), [0, 8]))


@pytest.mark.parametrize("name", OF_PAIRS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen": 401}, r"up to 401 tokens, but model\.max_positions=400\. Shorten"),
        ({"segment_ids_T": torch.zeros(8, dtype=torch.int64)}, r"makes pairs, but model\.segments=1\. Set"),
    ],
)
def test_what_the_encoder_cannot_read_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    """On a GPU an index beyond a table ends the process with an incomprehensible message."""
    packed = lay_out(torch.arange(8), [0, 8])
    with pytest.raises(ValueError, match=message):
        build(replace(ENCODERS[name], segments=1)).encode(replace(packed, **changes))  # type: ignore[call-arg]


@pytest.mark.parametrize("config", LLAMAS.values(), ids=LLAMAS)
def test_every_norm_has_the_epsilon_of_the_configuration(config: LlamaConfig) -> None:
    """At 1e-5 the parity with transformers does not show which number it is."""
    model = build(replace(config, norm_eps=0.25))
    found = {name: module.eps for name, module in model.named_modules() if hasattr(module, "eps")}
    assert "model.final_norm" in found and {*found.values()} == {0.25}


@pytest.mark.parametrize(
    ("config", "attention", "ffn"),
    [
        (ALBERT, (0, 0, 0, 0), (0, 0, 0, 0)),
        (WAYS["groups"], (0, 0, 1, 1), (0, 0, 1, 1)),
        (WAYS["turns"], (0, 1, 0, 1), (0, 1, 0, 1)),
        (WAYS["groups and turns"], (0, 1, 0, 1, 2, 3, 2, 3), (0, 1, 0, 1, 2, 3, 2, 3)),
        (replace(ALBERT, sharing="attention"), (0, 0, 0, 0), (0, 1, 2, 3)),
        (replace(ALBERT, sharing="ffn", groups=2), (0, 1, 2, 3), (0, 0, 1, 1)),
        (replace(ALBERT, sharing="none"), (0, 1, 2, 3), (0, 1, 2, 3)),
    ],
)
def test_which_layers_share_by_hand(config: AlbertConfig, attention: tuple[int, ...], ffn: tuple[int, ...]) -> None:
    assert (config.weights_of("attention"), config.weights_of("ffn")) == (attention, ffn)
    with torch.device("meta"):
        units = AlbertForMaskedLM(config).model.layers
    kinds = [type(unit) for unit in units]
    assert kinds == [Attention] * (max(attention) + 1) + [FeedForward] * (max(ffn) + 1)
    assert len(config.unit_passes) == len(units) and sum(config.unit_passes) == 2 * config.num_layers


def passes_of(model: AlbertForMaskedLM, batch: Batch) -> list[Tensor]:
    """Return the dropout masks of each pass through the shared attention: its dropout gets ones as input."""
    dropped: list[Tensor] = []
    unit = model.model.layers[0]
    assert isinstance(unit, Attention)
    plain = unit.dropout.forward
    unit.dropout.forward = lambda x: dropped.append(plain(torch.ones_like(x)) == 0) or plain(x)  # type: ignore[method-assign, func-returns-value]
    model.encode(batch.packed)
    return dropped


def test_every_pass_through_a_shared_layer_drops_other_numbers() -> None:
    """The same numbers in all layers would be another regularisation. They follow from the generator alone, which a
    step keys by (seed, step, microbatch)."""
    batch = pack([sequences([50])], row_tokens=50)
    runs = []
    for _ in range(2):
        model = build(replace(ALBERT, dropout=0.5)).train()
        torch.manual_seed(7)
        runs.append(passes_of(model, batch))
    assert len(runs[0]) == ALBERT.num_layers
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    for first in range(ALBERT.num_layers):
        for second in range(first):
            alike = (runs[0][first] == runs[0][second]).float().mean().item()
            assert alike == pytest.approx(0.5, abs=0.05)


LARGE: dict[str, Any] = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "intermediate_size": 4096}
ROBERTAS: dict[str, Any] = {"vocab_size": 50265, "segments": 1, "position_offset": 2, "norm_eps": 1e-5}
XSMALL: dict[str, Any] = {"hidden_size": 384, "num_heads": 6, "intermediate_size": 1536}
XLARGE = LARGE | {"hidden_size": 1536, "num_heads": 24, "intermediate_size": 6144, "convolution": 3}
PUBLISHED: dict[str, tuple[ModelConfig, int]] = {
    "modernbert-base": (ModernBertConfig(), 149_655_232),
    "modernbert-large": (ModernBertConfig(**LARGE | {"num_layers": 28, "intermediate_size": 2624}), 395_881_664),
    "bert-base": (BertConfig(), 109_514_298),
    "bert-large": (BertConfig(**LARGE), 335_174_458),
    "distilbert-base": (DistilBertConfig(), 66_985_530),
    "roberta-base": (BertConfig(**ROBERTAS), 124_697_433),
    "roberta-large": (BertConfig(**ROBERTAS | LARGE), 355_412_057),
    "xlnet-base": (XLNetConfig(), 116_750_336),
    "xlnet-large": (XLNetConfig(**LARGE), 360_300_800),
    "deberta-v3-base": (DebertaConfig(), 184_551_780),
    "deberta-v3-small": (DebertaConfig(num_layers=6), 142_024_548),
    "deberta-v3-xsmall": (DebertaConfig(**XSMALL), 70_958_820),
    "deberta-v3-large": (DebertaConfig(**LARGE), 435_191_908),
    "deberta-v2-xlarge": (DebertaConfig(**XLARGE), 887_085_156),
    "deberta-base": (DebertaConfig(version="v1", vocab_size=50265, buckets=512), 139_244_121),
}


@pytest.mark.runs
@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_models(name: str) -> None:
    """By arithmetic alone, of our model and of transformers', which share no code."""
    config, total = PUBLISHED[name]
    with torch.device("meta"):
        model = build_model(config, objective_of(config))
        twin = empty_twin(config, "head", "decoder", positions=512)
    ours, theirs = count_parameters(model), sum(parameter.numel() for parameter in twin.parameters())
    assert planned.count_parameters(config).total == total == ours == theirs
