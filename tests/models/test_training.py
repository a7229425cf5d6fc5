"""Requirements of a training step: gradients that ignore how rows are split, linear memory, one compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from benchmarks.batches import mean_loss, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, WEIGHT_UNIT, PackedText
from modernbert_train.config.schema import (
    CausalLmConfig,
    ComputeConfig,
    MaskedLmConfig,
    ModernBertConfig,
    ObjectiveConfig,
)
from modernbert_train.core.keyed_random import hash64, uniform
from modernbert_train.errors import ConfigError
from modernbert_train.models import attention
from modernbert_train.models.attention import choose_kernel, sdpa, varlen
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.build import build_model
from modernbert_train.models.heads import ChunkedLoss, loss_and_gradient, masked_lm_loss_sum
from modernbert_train.models.init import initialize
from modernbert_train.models.layers import EncoderLayer, rotary_tables, rotated
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.optim.stable_adamw import StableAdamW
from tests.support.encoder_training import first_predictions, opaque_attention, pack, sequences, small
from tests.support.encoders import build
from tests.support.mlm_lines import MASK, VOCABULARY, keys, line
from tests.support.operators import Operators


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("z_loss", [0.0, 0.25])
@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_the_loss_by_chunks_is_the_loss(chunk: int, z_loss: float, bf16: bool) -> None:
    """The training loss must be the cross-entropy of all logits, for any chunks and missing labels."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float32)  # noqa: E731
    inputs = [draw(7, 16), 0.5 * draw(40, 16), draw(40) - 3]  # the bias makes some log-sum-exps negative
    labels_M = torch.tensor([3, IGNORED_LABEL, 0, 39, IGNORED_LABEL, 3, 17])
    found = []
    for chunked in (True, False):
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if chunked:
                loss, _ = ChunkedLoss.apply(hidden, weight, bias, labels_M, None, z_loss, chunk, loss_and_gradient)
            else:
                loss = masked_lm_loss_sum(F.linear(hidden, weight, bias), labels_M, z_loss)
        assert loss.dtype == torch.float32
        (0.5 * loss).backward()
        found.append([loss.detach(), hidden.grad, weight.grad, bias.grad])
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == expected.dtype
        assert (ours - expected).norm() <= (1e-2 if bf16 else 1e-6) * expected.norm()


@pytest.mark.parametrize("objective", [MaskedLmConfig(), CausalLmConfig()], ids=lambda each: each.name)
@torch.no_grad()
def test_z_loss_is_added_to_the_loss(objective: ObjectiveConfig) -> None:
    """z_loss times the squared log partition of each prediction, as worked out from the logits."""
    config, batch = small(num_layers=1), pack([sequences([20])], row_tokens=20)
    losses = []
    for z_loss in (0.0, 0.25):
        model = build_model(config, replace(objective, z_loss=z_loss), ComputeConfig(attention="sdpa")).eval()
        initialize(model, config, seed=3)
        losses.append(float(model(batch).losses["mlm"]))
    logits_MV = model.logits(model.encode(batch.packed), batch.targets["positions_M"])
    real_M = batch.targets["labels_M"] != IGNORED_LABEL
    expected = 0.25 * logits_MV.double().logsumexp(-1).square()[real_M].sum()
    assert losses[1] - losses[0] == pytest.approx(float(expected), rel=1e-5) and expected > 1


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    """Rounding each exponential to 8 bits would cost a hundredth of a nat, which is what recipes differ by."""
    draw = torch.Generator().manual_seed(1)
    logits_CV = torch.randn(16, 4096, generator=draw).bfloat16()
    labels_C = torch.randint(0, 4096, (16,), generator=draw)
    expected = F.cross_entropy(logits_CV.double(), labels_C, reduction="sum")
    loss, gradient_CV, _ = loss_and_gradient(logits_CV.clone(), labels_C, z_loss=0.0)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert gradient_CV.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [3, 50])
def test_weighed_predictions_are_the_bound_of_masked_diffusion(chunk: int) -> None:
    """1/N sum over sequences of 1/t sum of -log p, of N tokens of text (LLaDA, arXiv 2502.09992, equation 3), by chunks
    and of all logits, gradients too; from the targets as the objective makes them."""
    config = MaskedLmConfig(mask_rate=0.5, mask_spread=0.5, mask_weight="1/rate", mask_token_share=1.0)
    config = replace(config, masking="bernoulli", random_token_share=0.0)
    ids, starts, lengths = line([9, 1, 20, 6])
    made = MaskedLM(config, VOCABULARY).make(PackedText(ids, starts, lengths, keys(4)), config)
    rates = 0.5 + 0.5 * (2 * uniform(hash64(keys(4), np.full(4, 0xAE, np.uint64))) - 1)
    generator = torch.Generator().manual_seed(0)
    hidden_TD, weight_VD = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (len(ids), 100))
    logs_TV = (hidden_TD @ weight_VD.t()).double().log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for start, length, rate in zip(starts.tolist(), lengths.tolist(), rates.tolist(), strict=True):
        for place in range(start, start + length):
            if made.ids_T[place] == MASK:
                expected = expected - logs_TV[place, ids[place]] / rate / 36
    grads = torch.autograd.grad(expected, (hidden_TD, weight_VD))

    positions_M, labels_M, weights_M = (
        torch.from_numpy(made.targets[f"{name}_M"]) for name in ("positions", "labels", "weights")
    )
    hidden_MD, weights_M = hidden_TD[positions_M], weights_M.float() / WEIGHT_UNIT
    inputs = (hidden_MD, weight_VD, None, labels_M, None)
    chunked, _ = ChunkedLoss.apply(*inputs, 0.0, chunk, loss_and_gradient, None, weights_M)
    plain = masked_lm_loss_sum(hidden_MD @ weight_VD.t(), labels_M, 0.0, weights_M)
    assert made.counts["mlm"] == 36 and 3 < (labels_M != IGNORED_LABEL).sum() < 33
    for loss in (chunked, plain):
        torch.testing.assert_close(loss.double() / 36, expected, atol=1e-6, rtol=2e-6)
        for found, wanted in zip(
            torch.autograd.grad(loss / 36, (hidden_TD, weight_VD), retain_graph=True), grads, strict=True
        ):
            torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-5)
    with_z_loss, _ = ChunkedLoss.apply(*inputs, 0.25, chunk, loss_and_gradient, None, weights_M)
    torch.testing.assert_close(with_z_loss, masked_lm_loss_sum(hidden_MD @ weight_VD.t(), labels_M, 0.25, weights_M))


@torch.no_grad()
def test_figures_weigh_predictions_as_training_does() -> None:
    """Else the loss on a line of a run of masked diffusion is not the loss that it is trained by."""
    batch, model = pack([sequences([40, 20])], row_tokens=64), build(small())
    weights_M = WEIGHT_UNIT * (1 + torch.arange(len(batch.targets["labels_M"])) % 3)
    weighed = batch.with_targets({"weights_M": weights_M})
    figures = model(weighed, figures=True).losses["mlm"]
    torch.testing.assert_close(figures, model(weighed).losses["mlm"])
    assert figures > 1.5 * model(batch, figures=True).losses["mlm"]


@pytest.mark.runs
def test_training_never_holds_all_logits() -> None:
    """They would be the largest tensor of a step, with their gradient twice that."""
    batch = pack([[torch.arange(600) % 100 + 5]], row_tokens=600, predict_every=1)
    with allocations() as seen:
        mean_loss(build(small(vocab_size=163), logit_chunk=128), batch).backward()
    with allocations() as plain:
        mean_loss(build(small(vocab_size=163)), batch, figures=True).backward()
    logits = len(batch.targets["positions_M"]) * 163 * 4
    assert logits in plain and logits not in seen and seen.count(128 * 163 * 4) > 0


@pytest.mark.runs
@torch.no_grad()
def test_validation_never_holds_all_logits() -> None:
    """With the next token to predict at each place they are 50 GB of a microbatch of base. The figures are the same."""
    batch = pack([[torch.arange(600) % 100 + 5]], row_tokens=600, predict_every=1)
    model, at_once = build(small(vocab_size=50_368)), build(small(vocab_size=50_368), logit_chunk=1000)
    with allocations() as seen:
        found = model(batch, figures=True)
    assert max(seen) == 256 * 50_368 * 4, "2^26 bytes of logits at most, on a CPU"
    plain = at_once(batch, figures=True)
    torch.testing.assert_close(found.losses["mlm"], plain.losses["mlm"], rtol=1e-6, atol=0)
    assert torch.equal(found.figures["mlm/hits"], plain.figures["mlm/hits"])


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Sizes of all tensors that operators return, views too."""
    sizes: list[int] = []

    def see(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        sizes.extend(each.untyped_storage().nbytes() for each in tree_leaves(out) if isinstance(each, Tensor))

    with Operators(see):
        yield sizes


def local_layer_sizes(config: ModernBertConfig, num_tokens: int) -> list[int]:
    """Bytes of every tensor of a forward and backward pass through a local layer, over one document."""
    layer = EncoderLayer(config, index=1)
    packed = pack([[torch.full((num_tokens,), 5)]], row_tokens=num_tokens).packed
    x_TD = torch.randn(num_tokens, config.hidden_size, requires_grad=True)
    with allocations() as seen:
        rotary = rotary_tables(packed.position_ids_T, config.local_rope_theta, config.head_size, torch.float32)
        layout = sdpa.prepare(packed, Visible.around(config.half_window))
        sum(layer(x_TD, None, rotary, sdpa, layout)).square().mean().backward()
    return seen


def test_local_layers_take_memory_linear_in_the_document() -> None:
    """8,192 tokens must train where 4,096 do with half the memory left: no tensor of T x T, each twice as large."""
    config = small(local_attention=128)
    half, whole = (local_layer_sizes(config, n) for n in (4096, 8192))
    assert max(whole) < 8192 * 8192 / 4  # bytes; even a mask of single bits would take half of that more
    assert max(whole) == pytest.approx(2 * max(half), rel=0.05)
    assert sum(whole) == pytest.approx(2 * sum(half), rel=0.05)


def recorded_kernels(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Kernels a and b that are sdpa; returns the mock whose `mock_calls` has their calls in order."""
    kernels = Mock()
    for name in ("a", "b"):
        kernels.attach_mock(Mock(spec=["prepare", "attend"]), name)
        getattr(kernels, name).prepare.side_effect = sdpa.prepare
        getattr(kernels, name).attend.side_effect = sdpa.attend
    monkeypatch.setattr(attention, "choose_kernel", lambda name, *_, **__: getattr(kernels, name))
    return kernels


def test_local_and_global_layers_may_use_different_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is prepared once, and global layers get theirs; without a second name all layers share one."""
    packed = pack([sequences([40, 30])], row_tokens=70).packed
    expected = build(small()).encode(packed)
    kernels = recorded_kernels(monkeypatch)
    assert torch.equal(build(small(), attention="a", global_attention="b").encode(packed), expected)
    calls = [(name, args[4]) if "attend" in name else name for name, args, _ in kernels.mock_calls]
    layers = [("b.attend", False), ("a.attend", True), ("a.attend", True)]
    assert calls == ["a.prepare", "b.prepare", *layers, *layers, layers[0]]
    for changes in ({"attention": "a"}, {"attention": "a", "global_attention": "a"}):
        kernels = recorded_kernels(monkeypatch)
        build(small(), **changes).encode(packed)
        assert [name for name, _, _ in kernels.mock_calls] == ["a.prepare", *["a.attend"] * 7]


def test_a_kernel_that_rotates_is_given_local_layers_unrotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """And global ones rotated, or positions would be applied twice or never; compiled too, where a question that
    torch.compile answers otherwise than Python would take the pass over q and k back in silence."""
    packed = pack([sequences([40, 30])], row_tokens=70).packed
    expected = build(small()).encode(packed)
    seen = []

    def attend_rotary(qkv: Tensor, cos: Tensor, sin: Tensor, layout: Any) -> Tensor:
        seen.append("rotary")
        return sdpa.attend(*rotated(qkv, cos, sin), layout, True)

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: Any, window: bool) -> Tensor:
        seen.append("local" if window else "global")
        return sdpa.attend(q, k, v, layout, window)

    kernel = SimpleNamespace(name="r", prepare=sdpa.prepare, attend=attend, attend_rotary=attend_rotary)
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)
    torch.testing.assert_close(build(small()).encode(packed), expected)
    assert seen == 2 * ["global", "rotary", "rotary"] + ["global"]
    seen.clear()
    layer = build(small()).model.layers[1].attn
    torch._dynamo.reset()
    graphs = torch.compile(lambda *given: layer(*given), backend="eager")
    rotary = rotary_tables(packed.position_ids_T, 10_000.0, small().head_size, torch.float32)
    x_TD = torch.randn(70, small().hidden_size)
    kernel.attend_rotary = lambda qkv, cos, sin, layout: qkv[:, 2] * 2
    kernel.attend = lambda q, k, v, layout, window: v
    torch.testing.assert_close(graphs(x_TD, rotary, kernel, None), layer(x_TD, rotary, kernel, None))


@pytest.mark.parametrize("key", ["attention", "global_attention"])
def test_a_kernel_that_cannot_serve_is_refused_by_its_key(key: str) -> None:
    """In the first forward pass, also where support was not checked before."""
    refused = rf"compute\.{key}=varlen: it needs a CUDA device, not cpu\. "
    with pytest.raises(ConfigError, match=rf"{refused}Usable here: sdpa\. Or set compute\.{key}=auto\."):
        build(small(), **{key: "varlen"}).encode(pack([sequences([5])], row_tokens=5).packed)


@pytest.mark.runs
def test_layers_are_compiled_in_every_phase_or_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allows a layer 8 graphs and runs it eagerly beyond, at half the speed until the end of the run."""
    torch._dynamo.reset()
    counters.clear()
    model = build(small(num_layers=4)).train()
    model.compile_layers(backend="eager")
    kernel = opaque_attention()
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)
    seen = []
    for row_tokens in range(30, 34):
        model(first_predictions(pack([sequences([row_tokens])], row_tokens), 4))
        seen.append(counters["stats"]["unique_graphs"])
    around = 3  # embedding, rotary tables, final norm
    assert seen == [2 + (3 + around) * (phase + 1) for phase in range(4)], "three kinds of layers; head and loss once"
    assert torch._dynamo.config.fail_on_recompile_limit_hit  # what dynamo remembers of a hit would outlive this test


@pytest.mark.runs
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    """One number read back in a step lets a GPU run dry. Tensors without values refuse every attempt to read one."""
    monkeypatch.setattr(varlen, "support", lambda *_: None)
    choose_kernel.cache_clear()
    compute = ComputeConfig(attention="varlen", activation_checkpointing=checkpointing)
    with torch.device("meta"):
        model = ModernBertForMaskedLM(small(), compute, z_loss=1e-4)
    batch = pack([sequences([40, 30])], row_tokens=80).to("meta")
    optimizer = StableAdamW(model.parameters(), 1e-3, weight_decay=1e-5)
    for _ in range(2):
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    choose_kernel.cache_clear()
    assert loss.device.type == optimizer.last_grad_norm.device.type == "meta"
    with pytest.raises(RuntimeError):
        loss.item()


def host_sees(args: Any, kwargs: Any) -> list[object]:
    """Return what the host asks of the device besides values: shapes, and numbers that are fixed by asking."""
    leaves = tree_leaves((args, kwargs))
    return [(tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each for each in leaves]


@pytest.mark.runs
def test_microbatches_differ_in_nothing_but_what_is_in_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one CUDA graph serves all batches with as many boundaries and the same longest sequence."""
    monkeypatch.setattr(varlen, "support", lambda *_: None)
    choose_kernel.cache_clear()
    with torch.device("meta"):
        model = ModernBertForMaskedLM(small(), ComputeConfig(attention="varlen"))
    seen = []
    for lengths, predicted in (([40, 30], 20), ([96], 3), ([3] * 30, 0)):
        batch = pack([sequences(lengths)], row_tokens=96, spare=1)
        boundaries, labels = torch.full((40,), 96, dtype=torch.int32), torch.full((24,), IGNORED_LABEL)
        given = batch.packed.cu_seqlens_S
        boundaries[: len(given)] = given
        labels[:predicted] = 7
        batch = mlm_batch(replace(batch.packed, cu_seqlens_S=boundaries), torch.arange(24), labels)
        assert batch.counts["mlm"] == predicted
        calls: list[list[object]] = []
        with Operators(lambda func, args, kwargs, _, calls=calls: calls.append([str(func), *host_sees(args, kwargs)])):
            model(batch.to("meta")).losses["mlm"].backward()
        model.zero_grad()
        seen.append(calls)
    choose_kernel.cache_clear()
    assert len(seen[0]) > 100 and seen[0] == seen[1] == seen[2]
