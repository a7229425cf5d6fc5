"""torch's own variable-length attention (FlashAttention-2): CUDA, bf16 or fp16, nothing to install.

It takes the packed buffer and its boundaries as they are, windows included, and is a custom operator with a fake
kernel, so a compiled layer stays one graph. Only arguments known to torch 2.11 are used; 2.13 accepts the same call.
Where `flash` has switched torch to FlashAttention-3, this calls it too, in the whole process.

Shape legend: T packed tokens, S sequences (padded), N heads, H head width, L longest sequence and one.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn.attention import varlen as torch_varlen

from modernbert_train.batch import Order, Packed
from modernbert_train.config.model import Bias
from modernbert_train.models.attention.visible import ScoreBias, Visible

name = "varlen"
traits = "window; backward, deterministic with compute.deterministic"


@dataclass(frozen=True)
class Layout:
    """What follows the documents; a compiled layer depends on neither number, so both are sizes that may change.

    Attributes:
        cu_seqlens_S: boundaries, on the device.
        reach_L0: no element, and one line more than any sequence has tokens. An int would be part of the graph, and
            `longest` itself could equal S, which torch then takes for one size.
        visible: what was asked.
    """

    cu_seqlens_S: Tensor
    reach_L0: Tensor
    visible: Visible

    @property
    def longest(self) -> int:
        """No sequence is longer; kernels launch blocks for so many tokens of each."""
        return self.reach_L0.shape[0] - 1


def support(device: torch.device, dtype: torch.dtype, order: Order = "all", bias: Bias | None = None) -> str | None:
    """See `Kernel.support`."""
    return without_mask(order, bias) or gpu_support(device, dtype)


def without_mask(order: Order, bias: Bias | None) -> str | None:
    """What kernels do not serve that take boundaries and a window, and nothing else."""
    if order == "given":
        return "it takes no order of the tokens' own, as the objective has one"
    return "it adds nothing to the scores, as the model needs" if bias else None


def gpu_support(
    device: torch.device,
    dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16),
) -> str | None:
    """What every GPU kernel here needs of a device, and its precisions; None if they are there."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if dtype not in dtypes:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        return f"it computes in {' or '.join(names[d] for d in dtypes)}, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return None


def prepare(packed: Packed, visible: Visible) -> Layout:
    """See `Kernel.prepare`; nothing is read back from the device."""
    _ask_for_flash_attention()
    return Layout(*sizes(packed), visible)


def sizes(packed: Packed) -> tuple[Tensor, Tensor]:
    """The first two of `Layout`, ready for compiled layers."""
    longest = packed.max_seqlen if packed.longest is None else packed.longest
    both = packed.cu_seqlens_S, packed.cu_seqlens_S.new_empty((longest + 1, 0))
    for each in both:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    return both


def backend(device: torch.device, dtype: torch.dtype) -> str:
    """What torch takes on a device in global layers: it is called once with a few tokens, and its log says so."""
    ends_S = torch.tensor([0, _TRIED], dtype=torch.int32, device=device)
    qkv = torch.zeros(_TRIED, 3, 1, 64, dtype=dtype, device=device, requires_grad=True)
    log, said = logging.getLogger(torch_varlen.__name__), _Said()
    level, propagate = log.level, log.propagate
    log.addHandler(said)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        attend(qkv[:, 0], qkv[:, 1], qkv[:, 2], prepare(Packed(ends_S, ends_S, ends_S, _TRIED), Visible()), False)
    finally:
        log.removeHandler(said)
        log.setLevel(level)
        log.propagate = propagate
    if "cuDNN" in said.text:
        return "cuDNN"
    return f"FlashAttention-{_version()}" if "Flash" in said.text else "unknown"


_TRIED = 256  # tokens; of 128 or fewer torch asks cuDNN less


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def _version() -> str:
    active = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    return "2" if active is None else active.removeprefix("FA")


@functools.cache
def _ask_for_flash_attention() -> None:
    """Else torch takes cuDNN first where there is no window from 2.14 on; an encoder on a GH200 fell to a fifth of its
    speed (pytorch issue 187770). Its varlen_attn has no argument for that, and follows the switch of SDPA."""
    if torch.torch_version.TorchVersion(torch.__version__) > "2.13.99":
        torch.backends.cuda.enable_cudnn_sdp(False)


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, layout: Layout, window: bool, bias: ScoreBias | None = None
) -> Tensor:
    """See `Kernel.attend`. Both ends of the window are included, as in `sdpa`."""
    boundaries, longest = layout.cu_seqlens_S, layout.longest
    assert bias is None, "asked for without support()"
    out = torch_varlen.varlen_attn(
        q_TNH, k_TNH, v_TNH, boundaries, boundaries, longest, longest, window_size=layout.visible.sides(window)
    )
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are asked for
    return out
