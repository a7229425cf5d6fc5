"""Print the kernels that attention launches on the null device as JSON: python -m tests.cuda_build.varlen_kernel.

The program makes torch prefer cuDNN by the rules of all releases, so that torch's `varlen_attn` calls it. null_cudnn.c
takes the place of cuDNN and records graphs and executions.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from modernbert_train.batch import Order, Packed
from modernbert_train.models.attention import cudnn, varlen, with_backend
from modernbert_train.models.attention.visible import Visible
from tests.cuda_build import flash
from tests.cuda_build.null import Account, faults

GPU, BF16 = torch.device("cuda"), torch.bfloat16
HEADS, WIDTH, ROW = 2, 64, 1024


class Cudnn:
    """The record of null_cudnn.c."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])

    def read(self) -> list[list[str]]:
        """Return the lines since the last call, each split into words."""
        with tempfile.NamedTemporaryFile("r") as file:
            self._library.null_cudnn_dump(file.name.encode())
            return [line.split() for line in file]


@contextmanager
def torch_prefers_cudnn() -> Iterator[None]:
    """Make torch's `varlen_attn` choose cuDNN: a function decides up to 2.14, SDPA's switches decide in 2.15."""
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with patch.object(torch_varlen, "_should_use_cudnn", lambda device: True):
            yield
    finally:
        torch.backends.cuda.enable_flash_sdp(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])


def line_of(lengths: list[int], order: Order = "all") -> Packed:
    """Return documents end to end, with boundaries padded to eight."""
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    padded = torch.full((8,), sum(lengths), dtype=torch.int32)
    padded[: len(ends)] = ends
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device=GPU)
    return Packed(ids, ids, padded.to(GPU), ROW, order=order, longest=max(lengths))


def qkv_of(line: Packed) -> Tensor:
    shape = (len(line.input_ids_T), 3, HEADS, WIDTH)
    return torch.zeros(shape, dtype=BF16, device=GPU, requires_grad=True)


def there_and_back(call: Callable[..., Tensor], line: Packed) -> dict[str, Any]:
    """Run a forward and a backward pass, and count their launches by kind."""
    qkv, account, asked = qkv_of(line), Account(), Cudnn()
    asked.read()
    account.reset()
    out = call(*qkv.unbind(1))
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert grad.shape == qkv.shape and out.shape == qkv[:, 0].shape
    launched, cudnn_lines = account.read(), asked.read()
    return {
        "flash": [sum(f"flash_{way}" in name for name in launched) > 0 for way in ("fwd", "bwd")],
        "cudnn": sum(words == ["execute"] for words in cudnn_lines),
        "cudnn_graphs": sum(words == ["graph"] for words in cudnn_lines),
        "cudnn_tensors": [words[1:] for words in cudnn_lines if words[0] == "tensor"],
        "faults": faults(launched),
    }


def of_kernel(kernel: Any, line: Packed, window: bool, compiled: bool = False) -> dict[str, Any]:
    """Run one of our kernels through `there_and_back`; a compiled one must be a single graph."""
    layout = kernel.prepare(line, Visible.around(64, line.order))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.attend(q, k, v, layout, window)  # type: ignore[no-any-return]

    return there_and_back(torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call, line)


def torchs_own(line: Packed) -> dict[str, Any]:
    """Run torch's `varlen_attn` forward. Its backward pass with cuDNN raises in torch 2.13."""
    ends, longest, asked, account = line.cu_seqlens_S, line.longest, Cudnn(), Account()
    asked.read()
    account.reset()
    with torch.no_grad():
        torch_varlen.varlen_attn(*qkv_of(line).unbind(1), ends, ends, longest, longest)
    flashes = any("flash_fwd" in name for name in account.read())
    return {"flash": flashes, "cudnn": asked.read().count(["execute"])}


def look() -> dict[str, Any]:
    """Run all cases."""
    line, causal = line_of([400, 300, 68]), line_of([400, 300, 68], "causal")
    found: dict[str, Any] = {"torch": torch.__version__, "said": with_backend(varlen, GPU, BF16)}
    found["varlen_refused"], found["cudnn_refused"] = varlen.support(GPU, BF16), cudnn.support(GPU, BF16)
    with torch_prefers_cudnn():
        found["torch's own"] = torchs_own(line)
        for compiled in (False, True):
            for window in (False, True):
                for each in (line, causal):
                    of = f"varlen {each.order} {window=} {compiled=}"
                    found[of] = of_kernel(varlen, each, window, compiled)
    with flash.installed("flash3"):
        third = flash.flash
        found["third_said"] = with_backend(third, GPU, BF16)
        found["third"] = of_kernel(third, line, window=True)
        found["third_windows"] = sorted(flash.WINDOWS)
    if varlen.missing_in_torch(cudnn._FORWARD, cudnn._BACKWARD, oldest="2.14") is None:
        with patch.object(torch.backends.cudnn, "version", lambda: cudnn.MIN_CUDNN):
            found["cudnn_refused_from_9.25"] = cudnn.support(GPU, BF16)
            found["cudnn_said"] = with_backend(cudnn, GPU, BF16)
        for name, lengths in (("first", [400, 300, 68]), ("like it", [390, 310, 68]), ("longer", [600, 168])):
            found[f"microbatch {name}"] = of_kernel(cudnn, line_of(lengths), window=False)
        for compiled in (False, True):
            for each in (line, causal):
                found[f"cudnn {each.order} {compiled=}"] = of_kernel(cudnn, each, False, compiled)
        found["cudnn local"] = of_kernel(cudnn, line, window=True)
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
