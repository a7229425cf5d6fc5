"""Attention kernels. If these break, a model silently sees the wrong tokens: other documents, or a wrong window."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention_module
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor
from torch._dynamo.utils import counters

from modernbert_train.batch import QUERY_RANK, Order
from modernbert_train.config.check import KERNEL_ORDERS
from modernbert_train.config.schema import BertConfig, ModernBertConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models.attention import (
    KERNELS,
    by_preference,
    choose_kernel,
    cudnn,
    flash,
    flash4,
    flex,
    kernel_report,
    sdpa,
    tiles,
    varlen,
)
from modernbert_train.models.attention.visible import Visible
from tests.support.attention import (
    computed,
    dense,
    inputs,
    line_of,
    packed,
    plain_forward,
    plain_gradients,
    scores_of,
    seen,
)  # fmt: skip

CPU = torch.device("cpu")
Gpu = Callable[[tuple[int, int]], torch.device]  # the fixture of conftest.py


# tokens before and after itself that a local layer sees, and the order
VISIBLE = [Visible.around(half, order) for order in ("all", "causal") for half in (0, 8, 64, 100)]
VISIBLE.append(Visible.around(8, "given"))


def named(value: object) -> str | None:
    return f"{value.order}-{value.window}" if isinstance(value, Visible) else None


def test_half_a_window_in_causal_order_holds_the_token_itself() -> None:
    """local_attention=128 is 64 on each side, or itself and 63 before it, as in transformers' ModernBertDecoder."""
    assert Visible.around(64) == Visible((64, 64), "all")
    assert Visible.around(64, "causal") == Visible((63, 0), "causal")
    assert Visible.around(0, "causal") == Visible((0, 0), "causal"), "never less than itself"
    assert [Visible.around(64, "causal").sides(window) for window in (True, False)] == [(63, 0), (-1, 0)]
    assert Visible(None, "causal").sides(True) == (-1, 0) and Visible().sides(True) == (-1, -1)


@pytest.mark.parametrize("visible", VISIBLE, ids=named)
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 1], [64], [128, 64], [63, 65, 1, 130], [1, 300, 7]])
def test_sdpa_equals_attention_written_out(lengths: list[int], window: bool, visible: Visible) -> None:
    """Forward and gradients, for sequences shorter, equal to and longer than blocks and windows; a token that sees
    nothing gets zeros, and gives nothing a gradient."""
    line = line_of(lengths, visible.order)
    qkv, weight = inputs(sum(lengths), 8)
    out, grad = computed(sdpa, qkv, weight, line, visible, window)
    visible_TT = seen(line, visible.window if window else None)
    expected = dense(qkv.requires_grad_(), visible_TT)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    (expected_grad,) = torch.autograd.grad(expected, qkv, weight)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-4)
    blind = ~visible_TT.any(1)
    assert blind.any() == (visible.order == "given")
    assert (out[blind] == 0).all() and (grad[blind][:, 0] == 0).all()


@pytest.mark.parametrize("order", ["all", "causal", "given"])
def test_a_bias_is_added_to_scaled_scores(order: Order) -> None:
    """Each sequence adds its own bias; hidden pairs stay hidden, and the bias gets a gradient."""
    line, (qkv, _) = line_of([7, 1, 20], order), inputs(28, 8)
    bias_NTT = torch.randn(2, 28, 28, generator=torch.Generator().manual_seed(3), requires_grad=True)
    layout = sdpa.prepare(line, Visible(order=order))
    out = sdpa.attend(*qkv.unbind(1), layout, False, lambda start, end: bias_NTT[:, start:end, start:end])
    expected = dense(qkv, seen(line), bias_NTT)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad(each.square().sum(), bias_NTT, retain_graph=True)[0] for each in (out, expected)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("capability", "heads", "first"),
    [((9, 0), 64, "tiles"), ((9, 0), 48, "varlen"), ((9, 0), None, "varlen"), ((8, 0), 64, "varlen")],
    ids=str,
)
def test_local_layers_are_ours_where_that_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, capability: tuple[int, int], heads: int | None, first: str
) -> None:
    """On Hopper, of heads that the kernel takes, in models that have local layers; elsewhere no one has timed it."""
    kernels = by_preference(gpu(capability), torch.bfloat16, "all", None, heads)
    assert next(iter(kernels)) == first and {*kernels} == {*KERNELS}
    monkeypatch.setattr(tiles, "missing_on_gpu", lambda: ["no Triton"])
    assert next(iter(by_preference(torch.device("cuda"), torch.bfloat16, "all", None, heads))) == "varlen"


def test_models_say_which_heads_their_local_layers_have() -> None:
    assert ModernBertConfig().local_heads == 64
    assert ModernBertConfig(global_attn_every_n_layers=1).local_heads is None
    assert BertConfig().local_heads is None


def test_auto_takes_sdpa_on_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without a line in the log the kernel of a run is unknown; one line for each step would drown it."""
    choose_kernel.cache_clear()
    with caplog.at_level(logging.INFO):
        kernels = {choose_kernel("auto", CPU, torch.float32).name for _ in range(3)}
    assert kernels == {"sdpa"}
    assert [record.getMessage() for record in caplog.records] == [
        "compute.attention=auto: using sdpa on cpu in float32"
    ]


def test_an_unknown_kernel_is_refused() -> None:
    """A typing error must not pick some kernel."""
    with pytest.raises(ConfigError, match=r"compute\.attention=fa9: no such kernel\. Usable here: sdpa"):
        choose_kernel("fa9", CPU, torch.float32)


def test_varlen_says_which_precision_it_needs(gpu: Gpu) -> None:
    """fp32 on a GPU would otherwise fail deep inside the first step."""
    assert varlen.support(gpu((9, 0)), torch.float32) == "it computes in bf16 or fp16, not float32"
    assert "a GPU has less" in str(varlen.support(gpu((7, 5)), torch.bfloat16))


def test_report_names_every_kernel() -> None:
    """`doctor` shows users why the fast kernel is not used on their machine, and the features of each."""
    report = kernel_report()
    assert list(report) == list(KERNELS) == ["varlen", "flash", "flex", "sdpa", "tiles", "cudnn"]
    assert all("window" in kernel.traits and "deterministic" in kernel.traits for kernel in KERNELS.values())
    assert report["sdpa"] is None
    assert (report["varlen"] is None) == torch.cuda.is_available()


# order, and whether the layer is local -> tokens seen on each side, of a half window of 8
SIDES: dict[tuple[Order, bool], tuple[int, int]] = {
    ("all", True): (8, 8), ("all", False): (-1, -1), ("causal", True): (7, 0), ("causal", False): (-1, 0),
}  # fmt: skip


@contextmanager
def flash_on_cpu() -> Iterator[list[tuple[str, int, int, bool]]]:
    """torch's two flash functions on a CPU, where torch has none: computed plainly, with a record of each call.

    They take the arguments that torch's own schema allows, and the backward function computes the gradients that its
    arguments stand for. So a wrong window, boundary or tensor shows as a wrong number.
    """
    calls: list[tuple[str, int, int, bool]] = []

    def scores(q: Tensor, k: Tensor, ends: Tensor, *window: int) -> Tensor:
        before, after = (None if side < 0 else side for side in window)
        return scores_of(q, k, ends, before, after)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout_p == 0.0 and not return_debug_mask and torch.equal(cum_seq_q, cum_seq_k)
        assert max_q == max_k >= cum_seq_q.diff().max()
        calls.append(("forward", window_size_left, window_size_right, is_causal))
        found = plain_forward(scores(query, key, cum_seq_q, window_size_left, window_size_right), value)
        return *found, *(torch.empty(0) for _ in range(3))

    def backward(
        grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
        cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
        unused: Tensor, *, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert dropout_p == 0.0 and max_q == max_k >= cum_seq_q.diff().max() and torch.equal(cum_seq_q, cum_seq_k)
        calls.append(("backward", window_size_left, window_size_right, is_causal))
        scores_NTT = scores(query, key, cum_seq_q, window_size_left, window_size_right)
        return plain_gradients(scores_NTT, query, key, value, out, logsumexp, grad_out)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


@pytest.mark.parametrize(("order", "window"), SIDES)
def test_varlen_calls_the_flash_functions_of_the_installed_torch_by_name(
    monkeypatch: pytest.MonkeyPatch, order: Order, window: bool
) -> None:
    """Not through `varlen_attn`, which may choose cuDNN from torch 2.14 on. Numbers must equal `sdpa`'s."""
    monkeypatch.setattr(torch_varlen, "varlen_attn", None)
    given = *inputs(104, 16), packed([40, 60, 1, 3]), Visible.around(8, order), window
    with flash_on_cpu() as calls:
        found = computed(varlen, *given)
    sides = *SIDES[order, window], (order, window) == ("causal", False)
    assert calls == [("forward", *sides), ("backward", *sides)]
    torch.testing.assert_close(found, computed(sdpa, *given))


def test_the_operators_of_varlen_are_what_a_compiler_takes_them_for() -> None:
    """Shapes and strides without values, gradients, nothing written in place: else a compiled layer reads nonsense."""
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = torch.randn(12, 3, 2, 16, generator=torch.Generator().manual_seed(3)).unbind(1)
    q, k, v = (x.requires_grad_() for x in (q.contiguous(), k, v.detach()))
    with flash_on_cpu():
        torch.library.opcheck(varlen._attention, (q, k, v, ends, 7, -1, -1))
        out, lse = varlen._attention(q, k, v, ends, 7, 3, 3)
        given = (torch.ones_like(out), *(x.detach() for x in (q, k, v, out, lse)), ends, 7, 3, 3)
        torch.library.opcheck(varlen._gradients, given)


@pytest.mark.parametrize(("active", "named"), [(None, "FlashAttention-2"), ("FA3", "FlashAttention-3")])
def test_varlen_says_which_version_its_calls_run(
    monkeypatch: pytest.MonkeyPatch, active: str | None, named: str
) -> None:
    """In the banner and in `doctor`: the third doubles the speed of global layers."""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
    monkeypatch.setattr(torch.version, "hip", None)
    assert varlen.backend(CPU, torch.bfloat16) == named


def test_a_torch_without_the_functions_that_varlen_calls_is_named_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A custom or future torch: the first step would end in torch's error, or use another window than the
    configured one."""
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    ask = varlen.missing_in_torch.__wrapped__
    assert ask(varlen._FORWARD, varlen._BACKWARD) is None
    remedy = ": install a torch from 2.11 to 2.15 of pytorch.org"
    assert ask(("_gone", "query")) == f"torch 2.99.0 has no _gone{remedy}"
    lacking = ask(("_flash_attention_forward", "query", "window_size_up", "max_q", "sink"))
    assert lacking == f"torch 2.99.0 has a _flash_attention_forward without window_size_up, sink{remedy}"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert ask(varlen._FORWARD, varlen._BACKWARD) == f"torch 2.99.0 was built without FlashAttention{remedy}"


@pytest.mark.parametrize(
    ("capability", "version", "deterministic", "lacks", "reason"),
    [
        ((9, 0), 92600, False, None, None),
        ((10, 0), 92500, False, None, None),
        ((8, 0), 92600, False, None, "it needs compute capability 9 or 10, and a GPU has another"),
        ((12, 0), 92600, False, None, "it needs compute capability 9 or 10, and a GPU has another"),
        ((9, 0), 92400, False, None, "it needs cuDNN 9.25.0, and torch 2.99.0 runs with 9.24.0: install torch 2.15"),
        ((9, 0), None, False, None, "it needs cuDNN 9.25.0, and torch 2.99.0 runs with none: install torch 2.15"),
        ((9, 0), 92600, True, None, "its backward pass sums in no fixed order"),
        ((9, 0), 92600, False, "torch 2.13.0 has none", "torch 2.13.0 has none"),
    ],
)
def test_cudnn_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    capability: tuple[int, int],
    version: int | None,
    deterministic: bool,
    lacks: str | None,
    reason: str | None,
) -> None:
    """Each would end a run in its first step, or give NaN; on older ones the whole encoder ran at a fifth of its speed.
    `auto` never takes it, since it is unmeasured."""
    device = gpu(capability)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(varlen, "missing_in_torch", lambda *_, oldest="": lacks if oldest else None)
    found = cudnn.support(device, torch.bfloat16)
    assert found is None if reason is None else str(found).startswith(reason)
    assert "it computes in bf16" in str(cudnn.support(device, torch.float32))
    order = list(by_preference(device, torch.bfloat16, "all", None, None))
    assert order.index("cudnn") > order.index("sdpa") and order[0] != "cudnn"


@pytest.mark.parametrize(
    ("row", "longest", "given"),
    [(1024, 700, 768), (1024, 30, 256), (1024, 1024, 1024), (8192, 4097, 5120), (8192, None, 8192)],
)
def test_cudnn_is_given_few_lengths(row: int, longest: int | None, given: int) -> None:
    """It builds a graph for each, tens of milliseconds of the host; local layers keep the true one."""
    line = replace(packed([4]), max_seqlen=row, longest=longest)
    layout = cudnn.prepare(line, Visible())
    assert layout.whole.longest == given and layout.local.longest == (longest or row)


@pytest.mark.skipif(len(flash.MISSING) < 2 or flash4.refusal() is None, reason="a FlashAttention is installed")
def test_flash_without_a_package_is_refused_with_the_ones_that_serve() -> None:
    """Users must learn that the package is missing before the run, not from an ImportError inside it."""
    with pytest.raises(ConfigError, match=r"compute\.attention=flash: no FlashAttention is .*Usable here: sdpa"):
        choose_kernel("flash", CPU, torch.float32)


@pytest.mark.parametrize(("order", "window"), SIDES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_2_is_called_with_the_same_borders_and_window(
    monkeypatch: pytest.MonkeyPatch, order: Order, window: bool, deterministic: bool
) -> None:
    """A window or boundaries given in another convention would train a different model without a word. The fourth is
    looked at in test_flash4.py."""
    called = Mock()
    monkeypatch.setattr(flash, "flash2", called)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    line, (qkv, _) = packed([40, 60]), inputs(100, 64)
    flash.attend(*qkv.unbind(1), flash.prepare(line, Visible.around(8, order)), window)
    attended, given = called.call_args
    assert all(map(torch.equal, attended, qkv.unbind(1)))
    of_queries, of_keys = given.pop("cu_seqlens_q"), given.pop("cu_seqlens_k")
    options = {"window_size": SIDES[order, True]} if window else {}
    options |= {"causal": True} if order == "causal" else {}
    longest = {f"max_seqlen_{kind}": line.max_seqlen for kind in "qk"}
    assert called.call_count == 1 and given == options | longest | {"deterministic": deterministic}
    assert torch.equal(of_queries, line.cu_seqlens_S) and torch.equal(of_keys, line.cu_seqlens_S)
    assert of_queries is not of_keys, "torch traces no autograd.Function that is given one tensor twice"


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), (2, 3, 4), 3),
        ((9, 0), (2, 4), 4),
        ((9, 0), (4,), 4),
        ((10, 0), (2, 3, 4), 4),
        ((8, 0), (2, 3, 4), 2),
        ((9, 0), (2,), 2),
        ((8, 0), (3, 4), None),
        ((10, 0), (3,), None),
    ],
)
def test_the_newest_flash_attention_that_runs_serves(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    capability: tuple[int, int],
    installed: tuple[int, ...],
    chosen: int | None,
) -> None:
    """Long documents would be a third slower without it; on the wrong GPU it would fail in the first step. `auto` takes
    the third and the fourth by itself: the second equals `varlen`."""
    device = gpu(capability)
    for version in (2, 3):
        monkeypatch.setattr(flash, f"flash{version}", object() if version in installed else None)
    refusal = None if 4 in installed else "flash-attn-4 is not installed"
    monkeypatch.setattr(flash, "flash_4_refusal", lambda: refusal)
    monkeypatch.setattr(flash, "_fourth_refusal", lambda: refusal)
    reason = flash.support(device, torch.bfloat16)
    assert choose_kernel("auto", device, torch.bfloat16).name == ("flash" if chosen in (3, 4) else "varlen")
    assert flash.is_third(device) is (chosen == 3) and flash.is_fourth(device) is (chosen == 4)
    if chosen is not None:
        assert reason is None
    elif capability[0] >= 9:
        assert reason == "flash-attn-4 is not installed"
    else:
        assert reason == "the FlashAttention that is installed does not run on a GPU"


FLEX_LENGTHS = [[1, 64, 65, 128, 129, 300], [687], [300, 387], [128, 128, 128, 128, 128, 47]]  # 687 tokens each


@pytest.mark.parametrize("order", ["all", "causal", "given"])
@pytest.mark.parametrize("half_window", [8, 64, 129, 200])
@pytest.mark.parametrize("lengths", [*FLEX_LENGTHS, [5], [128, 128]])
def test_flex_blocks_cover_what_is_visible(lengths: list[int], half_window: int, order: Order) -> None:
    """A missing block loses keys; one wrongly counted as fully visible shows a token other documents, or its target."""
    line, asked = line_of(lengths, order), Visible.around(half_window, order)
    layout = flex.prepare(line, asked)
    assert flex.prepare(line, Visible(None, order)).local is None
    position = torch.arange(sum(lengths))
    for mask, visible in ((layout.everywhere, seen(line)), (layout.local, seen(line, asked.window))):
        assert torch.equal(mask.mask_mod(position[:1], position[:1], position[:, None], position), visible)
        blocks = torch.nn.functional.pad(visible, (0, -len(position) % 128) * 2).unfold(0, 128, 128).unfold(1, 128, 128)
        some, every = blocks.flatten(2).any(-1), blocks.flatten(2).all(-1)
        partial = listed(mask.kv_num_blocks, mask.kv_indices)
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        assert not (some & ~(partial | full)).any()
        if order == "given":
            assert not full.any()
            continue
        assert not (partial & full).any()
        assert torch.equal(full, every)
        if order == "causal":
            assert torch.equal(partial | full, (partial | full).tril()), "blocks of later tokens alone"
        if mask is layout.everywhere:
            assert torch.equal(partial | full, some)
        else:  # blocks side by side may share a document and a window, but in no single pair
            rows, columns = partial.nonzero(as_tuple=True)
            assert ((rows - columns).abs() <= 1 + half_window // 128).all()


def test_flex_leaves_out_blocks_of_query_tokens_and_far_positions() -> None:
    """Query tokens are never keys; in local layers blocks of far positions are not computed."""
    line = packed([1024])
    ranks_T = torch.full((1024,), -1)
    ranks_T[896:] = QUERY_RANK
    line = replace(line, order="given", ranks_T=ranks_T, limits_T=torch.zeros(1024, dtype=torch.int64))
    layout = flex.prepare(line, Visible.around(64, "given"))
    seen = listed(layout.everywhere.kv_num_blocks, layout.everywhere.kv_indices)
    assert seen[:, :7].all() and not seen[:, 7].any()
    assert layout.local is not None
    near = listed(layout.local.kv_num_blocks, layout.local.kv_indices)
    assert near.sum() == 7 * 3 - 1, "each block sees itself and its neighbours"


def listed(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Key blocks that each query block names."""
    chosen = torch.arange(indices.shape[-1]) < num_blocks[0, 0, :, None]
    return torch.zeros_like(chosen).scatter(1, indices[0, 0].long(), chosen)


@pytest.mark.runs
@pytest.mark.parametrize("order", ["all", "causal", "given"])
@pytest.mark.parametrize("window", [True, False])
def test_flex_equals_sdpa_uncompiled(monkeypatch: pytest.MonkeyPatch, window: bool, order: Order) -> None:
    """Forward and gradients, through torch's own dense form of the operator, which the CPU computes when it is let."""
    monkeypatch.setattr(flex_attention_module, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention_module.flex_attention)
    case = *inputs(687, 16), line_of(FLEX_LENGTHS[0], order), Visible.around(64, order), window
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        out, grad = computed(flex, *case)
    expected, expected_grad = computed(sdpa, *case)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, expected_grad, atol=2e-5, rtol=1e-4)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("order", ["all", "causal", "given"])
@pytest.mark.parametrize("window", [True, False])
def test_flex_compiles_once_for_all_documents(window: bool, order: Order) -> None:
    """The compiled kernel computes the listed blocks only, and a compilation for each microbatch would end training."""
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    for lengths in FLEX_LENGTHS:
        line = line_of(lengths, order, spare=10 - len(lengths))
        visible = Visible.around(64, order)
        qkv = torch.randn(687, 3, 2, 16)
        with torch.no_grad():  # all that the CPU offers
            out = flex.attend(*qkv.unbind(1), flex.prepare(line, visible), window)
        expected = sdpa.attend(*qkv.unbind(1), sdpa.prepare(line, visible), window)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["varlen", "flash", "flex", "tiles"])
def test_kernels_say_what_they_cannot_show_a_token(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, name: str) -> None:
    """On a GPU that could run them; without an error they would show a token its target."""
    kernel, device = KERNELS[name], gpu((9, 0))
    monkeypatch.setattr(flash, "flash2", lambda: None)
    assert kernel.support(device, torch.bfloat16) is None
    reason = kernel.support(device, torch.bfloat16, "given")
    assert reason is None if name == "flex" else "order given by ranks" in str(reason)
    assert "cannot add a bias" in str(kernel.support(device, torch.bfloat16, "all", "sequences"))
    of_pairs = kernel.support(device, torch.bfloat16, "all", "pairs")
    assert of_pairs is None if name == "flex" else "cannot add a bias" in str(of_pairs)
    assert ("given" in KERNEL_ORDERS[name]) is (reason is None), "check says the same without a GPU"


def test_flex_says_where_it_cannot_serve(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """A run on a CPU would fail in its first backward pass, and without Triton on a GPU it would run out of memory.
    `auto` takes it in fp32; where Triton lacks a C compiler the first batch would end in a bug. Gradients of what is
    added to scores are added atomically: a run that asks for bits that repeat gets `sdpa`."""
    assert flex.support(CPU, torch.float32) == "FlexAttention lacks a backward pass on CPUs"
    device = gpu((9, 0))
    with monkeypatch.context() as deterministic:
        deterministic.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert flex.support(device, torch.bfloat16) is None
        assert "in no fixed order" in str(flex.support(device, torch.bfloat16, "all", "pairs"))
    for lack in ("Triton is not installed", "there is no C compiler"):
        monkeypatch.setattr(flex, "missing_on_gpu", lambda lack=lack: [lack])
        assert flex.support(device, torch.float32) == lack
