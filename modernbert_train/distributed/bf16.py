"""Whether a device computes in bf16, and what that wins here. Torch is imported only to ask it, as in gpus.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from modernbert_train.errors import ConfigError

if TYPE_CHECKING:
    import torch

# instructions that multiply in bf16, by torch's names: AMD's and Intel's, Intel's tiles, ARM's
INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")
_SIDE, _TURNS = 512, 5  # of the matrices of a product, and how often it is timed: some 20 ms


def cpu_has_bf16() -> bool:
    """Whether this processor has instructions that multiply in bf16."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in INSTRUCTIONS)


def takes_bf16(asked: str, key: str, *, on_gpu: bool) -> bool:
    """Whether to compute in bf16; `auto` does on a GPU that has it, and never on a CPU.

    Args:
        asked: auto, fp32 or bf16.
        key: that says so, for errors.
        on_gpu: whether this process computes on one.

    Raises:
        ConfigError: bf16 was asked for, and torch would imitate it here, in silence.
    """
    import torch

    if asked == "fp32" or (asked == "auto" and not on_gpu):
        return False
    has = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_has_bf16()
    if asked == "bf16" and not has:
        cost = "slowly" if on_gpu else f"and a product would take {1 / product_gain():.1f} times as long as in fp32"
        here = "this GPU" if on_gpu else "this processor"
        raise ConfigError(f"{key}=bf16: {here} has no bf16: torch would imitate it, {cost}. Set {key}=auto or fp32.")
    return has


def product_gain() -> float:
    """How many times as fast as in fp32 one core multiplies matrices in bf16."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, another process on the machine is measured too
    try:
        return _seconds(torch.float32) / _seconds(torch.bfloat16)
    finally:
        torch.set_num_threads(threads)


def _seconds(dtype: torch.dtype) -> float:
    import torch

    x = torch.ones(_SIDE, _SIDE, dtype=dtype)
    times = []
    for _ in range(1 + _TURNS):  # the first chooses its kernel
        began = time.thread_time()
        x @ x
        times.append(time.thread_time() - began)
    return min(times)


def cpu_gain_line(asked: str) -> str | None:
    """What a run in fp32 on this processor could win; None where it has no bf16, or fp32 is meant.

    Args:
        asked: compute.precision.
    """
    if asked != "auto" or not cpu_has_bf16():
        return None
    return (
        f"compute.precision=bf16 makes products {product_gain():.1f} times as fast on this processor; where that was "
        "4.2, steps were 1.7 times as fast at a width of 192 and 2.6 times at 768"
    )
