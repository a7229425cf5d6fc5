"""Requirements of a training step: gradients that ignore how rows are split, linear memory, one compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.batches import mean_loss, mlm_batch
from modernbert_train.batch import IGNORED_LABEL, WEIGHT_UNIT, PackedText
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModernBertConfig
from modernbert_train.core.keyed_random import hash64, uniform
from modernbert_train.errors import ConfigError
from modernbert_train.models import attention
from modernbert_train.models.attention import choose_kernel, sdpa, varlen
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.heads import ChunkedLoss, loss_and_gradient, masked_lm_loss_sum
from modernbert_train.models.layers import EncoderLayer, rotary_tables, rotated
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.objectives.mlm import MaskedLM
from modernbert_train.optim.stable_adamw import StableAdamW
from tests.support.encoder_training import first_predictions, opaque_attention
from tests.support.mlm_lines import MASK, VOCABULARY, keys, line

Make = Callable[..., Any]


@pytest.mark.parametrize("split", [[4], [1, 1, 1, 1], [3, 1], [1, 3]], ids=str)
def test_the_gradient_does_not_depend_on_the_split_into_microbatches(
    small: Make, build: Make, sequences: Make, pack: Make, split: list[int]
) -> None:
    """Else memory, or the number of GPUs, would change the training. Row 3 has few labels, one split has none."""
    rows = [[ids] for ids in sequences([90, 40, 2, 96])]
    model = build(small(), z_loss=1e-3)
    total = pack(rows, row_tokens=96).counts["mlm"]
    mean_loss(model, pack(rows, row_tokens=96)).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    batches, first = [pack([sequences([30])], row_tokens=96, predict_every=0)], 0
    for size in split:
        batches.append(pack(rows[first : first + size], row_tokens=96))
        first += size
    for batch in batches:
        (model(batch).losses["mlm"] / total).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4, msg=name)


def test_the_gradient_of_loss_and_z_loss_is_the_formula() -> None:
    """d(ce + w lse^2) / d logit = p - [label] + 2 w lse p, and nothing where there is no label."""
    generator = torch.Generator().manual_seed(0)
    logits_MV = (3 * torch.randn(6, 11, generator=generator)).requires_grad_()
    labels_M = torch.tensor([3, IGNORED_LABEL, 0, 10, IGNORED_LABEL, 3])
    (grad_MV,) = torch.autograd.grad(masked_lm_loss_sum(logits_MV, labels_M, 0.25), logits_MV)
    for logits_V, label, grad_V in zip(logits_MV.detach().double(), labels_M.tolist(), grad_MV, strict=True):
        expected_V = torch.zeros(11, dtype=torch.float64)
        if label != IGNORED_LABEL:
            partition = logits_V.exp().sum()
            share_V = logits_V.exp() / partition
            expected_V = share_V + 2 * 0.25 * partition.log() * share_V
            expected_V[label] -= 1
        torch.testing.assert_close(grad_V.double(), expected_V, atol=1e-5, rtol=1e-5)


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
    chunked, _ = ChunkedLoss.apply(
        hidden_MD, weight_VD, None, labels_M, None, 0.0, chunk, loss_and_gradient, None, weights_M
    )
    plain = masked_lm_loss_sum(hidden_MD @ weight_VD.t(), labels_M, 0.0, weights_M)
    assert made.counts["mlm"] == 36 and 3 < (labels_M != IGNORED_LABEL).sum() < 33
    for loss in (chunked, plain):
        torch.testing.assert_close(loss.double() / 36, expected, atol=1e-6, rtol=2e-6)
        for found, wanted in zip(
            torch.autograd.grad(loss / 36, (hidden_TD, weight_VD), retain_graph=True), grads, strict=True
        ):
            torch.testing.assert_close(found, wanted.float(), atol=1e-6, rtol=1e-5)
    z_losses = [
        ChunkedLoss.apply(hidden_MD, weight_VD, None, labels_M, None, 0.25, chunk, loss_and_gradient, None, weights_M)[
            0
        ]
    ]
    z_losses.append(masked_lm_loss_sum(hidden_MD @ weight_VD.t(), labels_M, 0.25, weights_M))
    torch.testing.assert_close(*z_losses)


@torch.no_grad()
def test_figures_weigh_predictions_as_training_does(small: Make, build: Make, sequences: Make, pack: Make) -> None:
    """Else the loss on a line of a run of masked diffusion is not the loss that it is trained by."""
    batch, model = pack([sequences([40, 20])], row_tokens=64), build(small())
    weights_M = WEIGHT_UNIT * (1 + torch.arange(len(batch.targets["labels_M"])) % 3)
    weighed = batch.with_targets({"weights_M": weights_M})
    figures = model(weighed, figures=True).losses["mlm"]
    torch.testing.assert_close(figures, model(weighed).losses["mlm"])
    assert figures > 1.5 * model(batch, figures=True).losses["mlm"]


@pytest.mark.runs
def test_training_never_holds_all_logits(small: Make, build: Make, pack: Make) -> None:
    """They would be the largest tensor of a step, with their gradient twice that."""
    batch = pack([[torch.arange(600) % 100 + 5]], row_tokens=600, predict_every=1)
    with Allocations() as seen:
        mean_loss(build(small(vocab_size=163), logit_chunk=128), batch).backward()
    with Allocations() as plain:
        mean_loss(build(small(vocab_size=163)), batch, figures=True).backward()
    logits = len(batch.targets["positions_M"]) * 163 * 4
    assert logits in plain.sizes and logits not in seen.sizes and seen.sizes.count(128 * 163 * 4) > 0


@pytest.mark.runs
@torch.no_grad()
def test_validation_never_holds_all_logits(small: Make, build: Make, pack: Make) -> None:
    """With the next token to predict at each place they are 50 GB of a microbatch of base. The figures are the same."""
    batch = pack([[torch.arange(600) % 100 + 5]], row_tokens=600, predict_every=1)
    model, at_once = build(small(vocab_size=50_368)), build(small(vocab_size=50_368), logit_chunk=1000)
    with Allocations() as seen:
        found = model(batch, figures=True)
    assert max(seen.sizes) == 256 * 50_368 * 4, "2^26 bytes of logits at most, on a CPU"
    plain = at_once(batch, figures=True)
    torch.testing.assert_close(found.losses["mlm"], plain.losses["mlm"], rtol=1e-6, atol=0)
    assert torch.equal(found.figures["mlm/hits"], plain.figures["mlm/hits"])


class Allocations(TorchDispatchMode):
    """Sizes of all tensors that operators return, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sizes += [tensor.untyped_storage().nbytes() for tensor in tree_leaves(out) if isinstance(tensor, Tensor)]
        return out


def local_layer_sizes(config: ModernBertConfig, pack: Make, num_tokens: int) -> list[int]:
    """Bytes of every tensor of a forward and backward pass through a local layer, over one document."""
    layer = EncoderLayer(config, index=1)
    packed = pack([[torch.full((num_tokens,), 5)]], row_tokens=num_tokens).packed
    x_TD = torch.randn(num_tokens, config.hidden_size, requires_grad=True)
    with Allocations() as seen:
        rotary = rotary_tables(packed.position_ids_T, config.local_rope_theta, config.head_size, torch.float32)
        layout = sdpa.prepare(packed, Visible.around(config.half_window))
        sum(layer(x_TD, None, rotary, sdpa, layout)).square().mean().backward()
    return seen.sizes


def test_local_layers_take_memory_linear_in_the_document(small: Make, pack: Make) -> None:
    """8,192 tokens must train where 4,096 do with half the memory left: no tensor of T x T, each twice as large."""
    config = small(local_attention=128)
    half, whole = (local_layer_sizes(config, pack, n) for n in (4096, 8192))
    assert max(whole) < 8192 * 8192 / 4  # bytes; even a mask of single bits would take half of that more
    assert max(whole) == pytest.approx(2 * max(half), rel=0.05)
    assert sum(whole) == pytest.approx(2 * sum(half), rel=0.05)


@contextmanager
def recorded_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, bool]]]:
    """Kernels named "a" and "b" that are sdpa and record (name, method, windowed)."""
    calls: list[tuple[str, str, bool]] = []

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def prepare(self, *args: Any) -> Any:
            calls.append((self.name, "prepare", False))
            return sdpa.prepare(*args)

        def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Any, window: bool) -> Tensor:
            calls.append((self.name, "attend", window))
            return sdpa.attend(q, k, v, layout, window)

    kernels = {name: Recorded(name) for name in ("a", "b")}
    monkeypatch.setattr(attention, "choose_kernel", lambda name, *_, **__: kernels[name])
    yield calls


def test_local_and_global_layers_may_use_different_kernels(
    monkeypatch: pytest.MonkeyPatch, small: Make, build: Make, sequences: Make, pack: Make
) -> None:
    """Each kernel is prepared once, and global layers get theirs; without a second name all layers share one."""
    packed = pack([sequences([40, 30])], row_tokens=70).packed
    expected = build(small()).encode(packed)
    with recorded_kernels(monkeypatch) as calls:
        out = build(small(), attention="a", global_attention="b").encode(packed)
        assert torch.equal(out, expected)
        layers = [("b", "attend", False), ("a", "attend", True), ("a", "attend", True)]
        assert calls == [("a", "prepare", False), ("b", "prepare", False), *layers, *layers, layers[0]]
    for changes in ({"attention": "a"}, {"attention": "a", "global_attention": "a"}):
        with recorded_kernels(monkeypatch) as calls:
            build(small(), **changes).encode(packed)
            assert [call[:2] for call in calls] == [("a", "prepare")] + 7 * [("a", "attend")]


def test_a_kernel_that_rotates_is_given_local_layers_unrotated(
    monkeypatch: pytest.MonkeyPatch, small: Make, build: Make, sequences: Make, pack: Make
) -> None:
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
def test_a_kernel_that_cannot_serve_is_refused_by_its_key(
    key: str, small: Make, build: Make, sequences: Make, pack: Make
) -> None:
    """In the first forward pass, also where support was not checked before."""
    refused = rf"compute\.{key}=varlen: it needs a CUDA device, not cpu\. "
    with pytest.raises(ConfigError, match=rf"{refused}Usable here: sdpa\. Or set compute\.{key}=auto\."):
        build(small(), **{key: "varlen"}).encode(pack([sequences([5])], row_tokens=5).packed)


@pytest.mark.runs
def test_layers_are_compiled_in_every_phase_or_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, small: Make, build: Make, sequences: Make, pack: Make
) -> None:
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
def test_no_step_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, small: Make, sequences: Make, pack: Make, checkpointing: bool
) -> None:
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


class Launches(TorchDispatchMode):
    """Everything the host asks of the device: operators, shapes, and numbers that are fixed by asking."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in tree_leaves((args, kwargs or {}))
        ]
        self.calls.append((str(func), *given))
        return func(*args, **(kwargs or {}))


@pytest.mark.runs
def test_microbatches_differ_in_nothing_but_what_is_in_their_tensors(
    monkeypatch: pytest.MonkeyPatch, small: Make, sequences: Make, pack: Make
) -> None:
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
        with Launches() as launches:
            model(batch.to("meta")).losses["mlm"].backward()
        model.zero_grad()
        seen.append(launches.calls)
    choose_kernel.cache_clear()
    assert len(seen[0]) > 100 and seen[0] == seen[1] == seen[2]
