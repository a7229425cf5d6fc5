"""Distances of a DeBERTa, their buckets, and kernels that look them up; test_parity.py compares the rest."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention_module
import transformers
from torch._dynamo.utils import counters

from benchmarks.batches import lay_out
from modernbert_train.batch import Order
from modernbert_train.config.schema import DebertaConfig
from modernbert_train.models import attention
from modernbert_train.models.attention import flex, sdpa
from modernbert_train.models.deberta import distance_rows
from modernbert_train.weights.formats.deberta import FORMAT
from tests.support.encoder_training import pack, sequences
from tests.support.encoders import DEBERTA, DEBERTA_V1, VOCABULARY, build, ids, twin_of

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.weekly
@pytest.mark.runs
@pytest.mark.parametrize(
    ("config", "order"),
    [
        pytest.param(DEBERTA, "given", id="v2-given"),
        pytest.param(DEBERTA_V1, "all", id="v1-all"),
        pytest.param(DEBERTA, "all", id="v2-all", marks=pytest.mark.slow),
        pytest.param(DEBERTA_V1, "given", id="v1-given", marks=pytest.mark.slow),
    ],
)
def test_flex_looks_up_what_sdpa_adds(config: DebertaConfig, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and gradients, the table's among them, through torch's own dense form of the operator; documents within
    and across the kernel's blocks of 128, and in an order whose query tokens stand elsewhere than their positions."""
    monkeypatch.setattr(flex_attention_module, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention_module.flex_attention)
    line = lay_out(ids(200), [0, 45, 70, 76, 172, 200])
    if order == "given":
        ranks_T = torch.randint(-1, 6, (200,), generator=torch.Generator().manual_seed(1))
        limits_T = torch.randint(0, 8, (200,), generator=torch.Generator().manual_seed(2))
        line = replace(line, order=order, ranks_T=ranks_T, limits_T=limits_T)
        line = replace(line, position_ids_T=line.position_ids_T // 2)
    found = []
    for kernel in (flex, sdpa):
        monkeypatch.setattr(attention, "choose_kernel", lambda *_, kernel=kernel: kernel)
        model = build(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow
            hidden_TD = model.encode(line)
            hidden_TD.square().sum().backward()
        found.append((hidden_TD, {name: parameter.grad for name, parameter in model.model.named_parameters()}))
    (ours, grads), (plain, expected) = found
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    assert expected["distances.weight"].abs().max() > 1e-2
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(grads[name], gradient, atol=2e-5 * max(scale, 1.0), rtol=1e-4, msg=name)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@torch.no_grad()  # all that the CPU offers
def test_flex_compiles_once_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel reads the tables itself; a compilation for each microbatch would end training."""
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    config = replace(DEBERTA, hidden_size=64)
    model = build(config)
    for boundaries in ([0, 45, 70, 76, 172, 200], [0, 10, 20, 30, 110, 200], [0, 1, 2, 95, 190, 200]):
        line = replace(lay_out(ids(200), boundaries), max_seqlen=96)
        monkeypatch.setattr(attention, "choose_kernel", lambda *_: flex)
        ours = model.encode(line)
        monkeypatch.setattr(attention, "choose_kernel", lambda *_: sdpa)
        torch.testing.assert_close(ours, model.encode(line), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1


def test_rows_of_distances_are_the_published_ones() -> None:
    """256 buckets up to 512: by hand at the edges, and by transformers' own function for all, farther ones too."""
    rows = distance_rows(DebertaConfig(), 1000)
    by_hand = {
        -999: 0, -511: 1, -510: 1, -128: 128, -1: 255, 0: 256, 1: 257, 128: 384, 129: 385, 511: 511, 512: 511, 999: 511
    }  # fmt: skip
    assert {distance: int(rows[999 + distance]) for distance in by_hand} == by_hand
    theirs = transformers.models.deberta_v2.modeling_deberta_v2.make_log_bucket_position
    distances = torch.arange(-4999, 5000)
    for buckets, farthest in ((256, 512), (256, 2048), (256, 4096), (32, 128), (7, 40), (8, 16)):
        expected = (theirs(distances, buckets, farthest).long() + buckets).clamp(0, 2 * buckets - 1)
        config = replace(DEBERTA, buckets=buckets, max_distance=farthest)
        assert torch.equal(distance_rows(config, 5000), expected), (buckets, farthest)


@pytest.mark.runs
@torch.no_grad()
def test_a_longer_context_leaves_shorter_texts_as_they_were() -> None:
    """A phase of longer rows raises max_positions: the weights fit, texts of before have the same states to the
    bit, and longer ones are what transformers computes of them, of the published 256 buckets up to 512 too."""
    short = replace(DEBERTA, max_positions=20)
    model = build(short)
    before, longer = pack([sequences([20])], row_tokens=20), pack([sequences([90])], row_tokens=90)
    was = model.encode(before.packed)
    with pytest.raises(ValueError, match=r"sequences of up to 90 tokens, but model\.max_positions=20"):
        model.encode(longer.packed)
    extended = replace(short, max_positions=90)
    model.set_phase(extended)
    assert torch.equal(model.encode(before.packed), was)
    settings = FORMAT.describe(extended, "all", (), 90, VOCABULARY)
    assert (settings["max_position_embeddings"], settings["max_relative_positions"]) == (90, 16)
    ids_T = longer.packed.input_ids_T[None, :90]
    torch.testing.assert_close(model.encode(longer.packed)[:90], twin_of(model).deberta(ids_T)[0][0], **CLOSE)

    published = replace(DEBERTA, max_positions=1024, buckets=256, max_distance=512)  # but for the positions
    model, ids_T = build(published), ids(900)
    hidden_TD = model.encode(lay_out(ids_T, [0, 900]))
    torch.testing.assert_close(hidden_TD, twin_of(model).deberta(ids_T[None])[0][0], **CLOSE)
    rows = distance_rows(published, 1024)
    assert not rows[:512].any() and rows[512] == 1, "512 and farther are one"
