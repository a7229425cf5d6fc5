"""ModernBERT-base and -large at their real sizes against transformers, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention import sdpa
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.init import initialize
from modernbert_train.models.layers import EncoderLayer, rotary_tables
from tests.support.encoders import twin_of

Make = Callable[..., Any]
BASE = ModernBertConfig(global_rope_theta=160_000.0)
LARGE = replace(BASE, hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)


def compare(model: Any, batches: list[list[Tensor]], pack: Make, row_tokens: int, backward: bool = True) -> None:
    """One packed pass of ours against transformers on padded batches: hidden states, masked logits, gradients.

    Args:
        model: ours; transformers' gets the same weights.
        batches: sequences that transformers pads together; we pack all of them into rows.
        pack: the fixture.
        row_tokens: capacity of a row.
        backward: compare the gradient of every parameter too.
    """
    twin = twin_of(model)
    twin.set_attn_implementation("sdpa")
    sequences = [ids for batch in batches for ids in batch]
    rows: list[list[Tensor]] = [[]]
    for ids in sequences:
        if sum(len(other) for other in rows[-1]) + len(ids) > row_tokens:
            rows.append([])
        rows[-1].append(ids)
    batch = pack(rows, row_tokens, predict_every=5)
    with torch.set_grad_enabled(backward):
        hidden_TD = model.encode(batch.packed)
        logits_MV = model.logits(hidden_TD, batch.targets["positions_M"])[: batch.counts["mlm"]]
        if backward:
            loss = torch.nn.functional.cross_entropy(logits_MV, batch.targets["labels_M"][: batch.counts["mlm"]])
            loss.backward()

    starts = [index * row_tokens + sum(map(len, row[:k])) for index, row in enumerate(rows) for k in range(len(row))]
    done = predicted = 0
    for padded in batches:
        ids = torch.nn.utils.rnn.pad_sequence(padded, batch_first=True, padding_value=1)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(s)) for s in padded], batch_first=True)
        with torch.set_grad_enabled(backward):
            hidden = twin.model(input_ids=ids, attention_mask=mask).last_hidden_state
            chosen = torch.cat([hidden[i, : len(s) : 5] for i, s in enumerate(padded)])
            logits = twin.decoder(twin.head(chosen))
        for index, own in enumerate(padded):
            start = starts[done + index]
            expected = hidden[index, : len(own)]
            torch.testing.assert_close(hidden_TD[start : start + len(own)], expected, atol=1e-5, rtol=1e-5)
        ours = logits_MV[predicted : predicted + len(logits)]
        torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-5)
        if backward:
            labels = torch.cat([s[::5] for s in padded])
            summed = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (summed / batch.counts["mlm"]).backward()
        done, predicted = done + len(padded), predicted + len(logits)
    assert predicted == batch.counts["mlm"]

    expected_grads = {name: p.grad for name, p in twin.named_parameters()}
    for name, parameter in model.named_parameters() if backward else ():
        error = (parameter.grad - expected_grads[name]).norm() / expected_grads[name].norm()
        assert error < 1e-4, f"{name}: {error}"


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("config", [BASE, LARGE], ids=["base", "large"])
def test_real_sizes_equal_transformers(build: Make, sequences: Make, pack: Make, config: ModernBertConfig) -> None:
    """Every length at which windows and blocks begin and end, in packed rows of the first phase's length."""
    first, second = sequences([64, 65, 1, 128, 129], config.vocab_size), sequences([1024], config.vocab_size)
    compare(build(config), [first, second], pack, row_tokens=1024)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_document_of_8192_tokens_equals_transformers(build: Make, sequences: Make, pack: Make) -> None:
    """Long context is the point of the architecture; an error of angles or windows grows with the distance."""
    batches = [sequences([8192], BASE.vocab_size), sequences([300], BASE.vocab_size)]
    compare(build(BASE), batches, pack, row_tokens=8192, backward=False)


@pytest.mark.runs
@pytest.mark.parametrize("query", [0, 64, 100, 199])
def test_a_local_layer_of_base_sees_64_tokens_to_each_side(pack: Make, sequences: Make, query: int) -> None:
    """Distance 64 attends, 65 does not, through the whole layer; one off is another model."""
    layer = EncoderLayer(BASE, index=1)
    initialize(layer, BASE, seed=3)
    layer.eval()
    packed = pack([sequences([200])], row_tokens=200).packed
    x_TD = torch.randn(200, BASE.hidden_size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rotary = rotary_tables(packed.position_ids_T, BASE.local_rope_theta, BASE.head_size, torch.float32)
    out_TD = sum(layer(x_TD, None, rotary, sdpa, sdpa.prepare(packed, Visible.around(BASE.half_window))))
    (grad_TD,) = torch.autograd.grad(out_TD[query, 0], x_TD)
    seen = grad_TD.abs().sum(1).nonzero().flatten().tolist()
    assert seen == list(range(max(0, query - 64), min(200, query + 65)))
