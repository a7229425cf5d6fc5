"""FlashAttention-4 as an operator: boundaries, windows, gradients, the comparison before its first use, its versions.

The package needs a GPU, so a plain form with the same arguments replaces its two functions here.
tests/cuda_build/test_flash4.py compiles and calls the real package.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.config import packages
from modernbert_train.config.schema import ComputeConfig
from modernbert_train.errors import ConfigError
from modernbert_train.models import attention
from modernbert_train.models.attention import choose_kernel, flash, flash4, sdpa, tiles
from modernbert_train.models.attention.visible import Visible
from modernbert_train.models.attention.written_out import LENGTHS, written_out
from tests.support.attention import computed, dense, inputs, packed, plain_forward, plain_gradients, scores_of, seen

CPU, GPU = torch.device("cpu"), torch.device("cuda")
KINDS = [Visible.around(half, order) for order in ("all", "causal") for half in (0, 8, 64)]
Functions = tuple[Callable[..., Any], Callable[..., Any]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, softmax_scale: Any = None, window_size_left: Any = None,
    window_size_right: Any = None, return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """`_flash_attn_fwd` of flash-attn-4 4.0.0b36, with its five results. A window of -1 is no token there too."""
    assert return_lse and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k >= int(cu_seqlens_q.diff().max())
    scores_NTT = scores_of(q, k, cu_seqlens_k, window_size_left, window_size_right)
    return *plain_forward(scores_NTT, v), None, None, None


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: Any = None,
    window_size_left: Any = None, window_size_right: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, deterministic: bool = False, dq: Any = None, dk: Any = None,
    dv: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_flash_attn_bwd`, from the saved log-sum-exp, as the package does it."""
    assert dout.is_contiguous() and all(each.is_contiguous() for each in (dq, dk, dv))
    scores_NTT = scores_of(q, k, cu_seqlens_k, window_size_left, window_size_right)
    for gradient, found in zip((dq, dk, dv), plain_gradients(scores_NTT, q, k, v, out, lse, dout), strict=True):
        gradient.copy_(found)
    return dq, dk, dv


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Functions], None]]:
    """Put two functions in the place of the package's."""
    monkeypatch.setattr(flash4, "installed_version", lambda _: "4.0.0b36")

    def install(functions: Functions) -> None:
        monkeypatch.setattr(flash4, "load", lambda: functions)

    flash4._prove.cache_clear()
    install((forward, backward))
    yield install
    flash4._prove.cache_clear()


@pytest.mark.parametrize("visible", KINDS, ids=lambda each: f"{each.order}-{each.window}")
@pytest.mark.parametrize("window", [True, False])
def test_the_operator_and_its_gradient_equal_sdpa(installed: Any, visible: Visible, window: bool) -> None:
    """The numbers that the package is given, and what becomes of its gradients."""
    case = *inputs(100, 16), packed([1, 40, 59]), visible, window
    torch.testing.assert_close(computed(flash4, *case), computed(sdpa, *case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sides", [(-1, -1), (16, 16), (15, 0), (-1, 0)])
def test_gradients_written_out_equal_those_of_autograd(sides: tuple[int, int]) -> None:
    """Kernels are judged by them."""
    q, k, v, grad = torch.randn(4, sum(LENGTHS), 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inputs = [each.requires_grad_() for each in (q, k, v)]
    out, *grads = written_out(*inputs, grad, sides)
    torch.testing.assert_close(tuple(grads), torch.autograd.grad((out * grad).sum(), inputs))
    reach = [300 if side < 0 else side for side in sides]
    torch.testing.assert_close(out, dense(torch.stack((q, k, v), 1), seen(packed([*LENGTHS]), (reach[0], reach[1]))))


@pytest.mark.runs
@pytest.mark.parametrize(("before", "after"), [(-1, -1), (8, 8), (7, 0), (-1, 0)])
def test_torch_finds_nothing_wrong_with_the_operator(installed: Any, before: int, after: int) -> None:
    """Its schema, its fake kernel, and its gradient under AOTAutograd, with sizes that change too."""
    q, k, v = torch.randn(40, 3, 2, 16).requires_grad_().unbind(1)
    ends = torch.tensor([0, 1, 25, 40, 40], dtype=torch.int32)
    torch.library.opcheck(flash4._attention, (q, k, v, ends, 24, before, after))
    out, lse = flash4._attention(q, k, v, ends, 24, before, after)
    given = [each.detach() for each in (torch.randn_like(out), q, k, v, out, lse)]
    torch.library.opcheck(flash4._gradients, (*given, ends, 24, before, after))


@pytest.mark.runs
def test_a_compiled_layer_stays_one_graph_for_any_documents(installed: Any) -> None:
    """The package's function breaks it, which costs more than the kernel wins."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    visible = Visible.around(8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(qkv: Tensor, layout: Any, window: bool) -> Tensor:
        return flash.attend(*(qkv * 2).unbind(1), layout, window) + 1

    for lengths in ([40, 60], [1, 2, 3, 94], [100]):
        batch = packed(lengths, spare=9 - len(lengths))
        for window in (False, True):
            qkv = torch.randn(100, 3, 2, 16).requires_grad_()
            out = layer(qkv, flash4.prepare(batch, visible), window)
            (grad,) = torch.autograd.grad(out.sum(), qkv)
            plain = sdpa.attend(*(qkv * 2).unbind(1), sdpa.prepare(batch, visible), window) + 1
            torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(grad, torch.autograd.grad(plain.sum(), qkv)[0], atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "one for each reach"


def wrong(name: str) -> Functions:
    """The same functions with a fault."""

    def broken_forward(**given: Any) -> Any:
        if name == "window" and given["window_size_left"] is not None:
            given["window_size_left"] += 1
        if name == "boundaries":
            ends = given["cu_seqlens_q"]
            given["cu_seqlens_q"] = given["cu_seqlens_k"] = torch.cat([ends[:1], ends[-1:]])
            given["max_seqlen_q"] = given["max_seqlen_k"] = int(ends[-1])
        if name == "stops":
            raise AssertionError("head_dim is not supported on SM90")
        return forward(**given)

    def broken_backward(**given: Any) -> Any:
        grads = backward(**given)
        if name in ("dq", "dk", "dv"):
            given[name][5:70] *= 1.3  # as a race does: some rows, not all
        if name == "nan":
            given["dk"][3] = float("nan")
        return grads

    return broken_forward, broken_backward


@pytest.mark.parametrize("fault", ["window", "boundaries", "dq", "dk", "dv", "nan", "stops"])
def test_a_package_that_computes_something_else_is_refused_before_it_is_used(installed: Any, fault: str) -> None:
    """A race in dQ and dK went through releases of it, and nothing but the loss of a run showed it, days later."""
    installed(wrong(fault))
    qkv = torch.randn(100, 3, 2, 16)
    with pytest.raises(ConfigError) as refused:
        flash4.attend(*qkv.unbind(1), flash4.prepare(packed([100]), Visible.around(8)), True)
    message = str(refused.value)
    assert "flash-attn-4 4.0.0b36" in message and "Set compute.attention=varlen" in message
    if fault == "stops":
        assert "does not run: AssertionError: head_dim is not supported on SM90" in message
    else:
        assert "relative errors of the output " in message and "where 4e-03 is rounding" in message


def test_it_is_compared_once_for_each_kind_of_call(installed: Any) -> None:
    """In a process; the forward pass of a step has other things to do."""
    calls = []
    installed((lambda **given: calls.append(given) or forward(**given), backward))
    qkv, visible = torch.randn(300, 3, 1, 16), Visible.around(8)
    few, many = packed([100, 200]), packed([1] * 300)
    for batch in (few, many):
        for _ in range(3):
            for window in (False, True):
                flash4.attend(*qkv.unbind(1), flash4.prepare(batch, visible), window)
    proofs = [given for given in calls if len(given["q"]) == sum(LENGTHS)]
    assert len(calls) == 12 + 4 and len(proofs) == 4
    assert sorted(len(given["cu_seqlens_q"]) - 1 > 256 for given in proofs) == [False, False, True, True]


def test_compute_deterministic_reaches_the_package(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    installed((forward, lambda **given: asked.append(given["deterministic"]) or backward(**given)))
    for deterministic in (True, False):
        asked.clear()
        monkeypatch.setattr(
            torch, "are_deterministic_algorithms_enabled", lambda deterministic=deterministic: deterministic
        )
        qkv = torch.randn(10, 3, 1, 16).requires_grad_()
        flash4.attend(*qkv.unbind(1), flash4.prepare(packed([10]), Visible()), False).sum().backward()
        assert asked == [deterministic, deterministic], "the proof and the step"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a package flash-attn-4 of some version into this environment, with these functions."""
    real = importlib.metadata.version

    def forget() -> None:
        for cached in (flash4.load, flash4.refusal, flash._fourth_refusal, choose_kernel):
            cached.cache_clear()

    def put(version: str, functions: Functions = (forward, backward)) -> None:
        monkeypatch.setattr(packages, "version", lambda name: version if name == "flash-attn-4" else real(name))
        interface = ModuleType("flash_attn.cute.interface")
        interface._flash_attn_fwd, interface._flash_attn_bwd = functions  # type: ignore[attr-defined]
        cute = ModuleType("flash_attn.cute")
        cute.interface = interface  # type: ignore[attr-defined]
        for name, module in (("flash_attn", ModuleType("flash_attn")), ("flash_attn.cute", cute)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, interface.__name__, interface)

    forget()
    yield put
    forget()


@pytest.mark.parametrize(
    "version", ["4.0.0b3", "4.0.0b20", "4.0.0b25", "0.0.0", "4.0.0b26", "4.0.0b36", "4.0.0", "4.1"]
)
def test_a_beta_before_the_races_were_mended_is_refused_by_name(package: Any, version: str) -> None:
    package(version)
    reason = flash4.refusal()
    if version in ("4.0.0b26", "4.0.0b36", "4.0.0", "4.1"):
        assert reason is None
    else:
        assert str(reason).startswith(f"flash-attn-4 {version} is older than 4.0.0b26")
        assert "pip install --upgrade 'flash-attn-4[cu13]>=4.0.0b26'" in str(reason)


@pytest.mark.parametrize("fault", ["forward", "backward", "gone", "import"])
def test_a_package_with_other_functions_is_refused_when_it_is_chosen(
    package: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """And not in the first step."""

    def other(q: Tensor, k: Tensor, v: Tensor, window_size: Any = None) -> None: ...

    package("4.0.0b99", (other if fault == "forward" else forward, other if fault == "backward" else backward))
    if fault == "gone":
        del sys.modules["flash_attn.cute.interface"]._flash_attn_bwd
    if fault == "import":
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    reason = str(flash4.refusal())
    if fault == "import":
        assert "import" in reason
    else:
        assert reason.startswith("flash-attn-4 4.0.0b99 has other functions than this program calls (")
        assert "pip install --upgrade 'flash-attn-4[cu13]>=4.0.0b26'" in reason


@pytest.mark.parametrize(
    ("capability", "local", "wide"),
    [
        ((9, 0), "tiles", "flash"),
        ((10, 0), "varlen", "flash"),
        ((12, 0), "varlen", "flash"),
        ((8, 0), "varlen", "varlen"),
    ],
)
def test_auto_takes_it_for_global_layers_of_hopper_and_later(
    package: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], local: str, wide: str
) -> None:
    package("4.0.0b36")
    gpu(capability)
    assert choose_kernel("auto", GPU, torch.bfloat16).name == wide
    assert choose_kernel("auto", GPU, torch.bfloat16, local_heads=64).name == local
    for kernel in (flash, tiles, attention.varlen):
        monkeypatch.setattr(kernel, "prepare", lambda packed, visible, name=kernel.name: name)
    for asked, expected in (("auto", (wide, local)), ("varlen", ("varlen", "varlen"))):
        compute = ComputeConfig(attention=asked)  # type: ignore[arg-type]
        found = attention.for_each_reach(compute, packed([5]), GPU, torch.bfloat16, 8, 64)
        assert tuple(found[is_global][0].name for is_global in (True, False)) == expected
        assert tuple(found[is_global][1] for is_global in (True, False)) == expected


def test_auto_says_so_where_an_installed_one_is_passed_over(package: Any, gpu: Any, capsys: Any) -> None:
    package("4.0.0b5")
    gpu((9, 0))
    for _ in range(2):
        choose_kernel.cache_clear()
        assert choose_kernel("auto", GPU, torch.bfloat16).name == "varlen"
    said = capsys.readouterr().err
    assert said.count("FlashAttention-4 is installed and not used: flash-attn-4 4.0.0b5 is older") == 1
    with pytest.raises(ConfigError, match=r"compute\.attention=flash: .*4\.0\.0b5 is older than 4\.0\.0b26"):
        choose_kernel("flash", GPU, torch.bfloat16)


@pytest.mark.parametrize(("capability", "served"), [((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_it_is_refused_where_it_has_no_deterministic_backward_pass(
    package: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: bool
) -> None:
    """There the package refuses it with an assertion: a run would end in its first step."""
    package("4.0.0b36")
    gpu(capability)
    assert flash.support(GPU, torch.bfloat16) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    reason = flash.support(GPU, torch.bfloat16)
    assert reason is None if served else "compute.deterministic requires" in str(reason)


def test_check_refuses_an_old_one_without_importing_it(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package("4.0.0b12")
    monkeypatch.setattr(packages, "_is_there", lambda name: name == "flash_attn")
    (message,) = packages.missing_kernels(ComputeConfig(global_attention="flash"))
    assert message.startswith("compute.global_attention=flash: flash-attn-4 4.0.0b12 is older than 4.0.0b26")
    assert message.endswith("Or set compute.global_attention=auto.")
    package("4.0.0b36")
    assert list(packages.missing_kernels(ComputeConfig(global_attention="flash"))) == []
