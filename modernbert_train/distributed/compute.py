"""Device and precision of a run, and how a CPU process keeps its memory."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from modernbert_train.config.schema import ComputeConfig
from modernbert_train.distributed.bf16 import takes_bf16
from modernbert_train.distributed.launched import from_launcher
from modernbert_train.distributed.shared_gpu import gpu_of_rank
from modernbert_train.distributed.visible_gpus import uses_gpu
from modernbert_train.errors import ConfigError


def release_freed_memory() -> None:
    """Return memory freed during the start to the system (glibc only; a no-op elsewhere)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next allocation instead of returning each large tensor to the system.

    Call it after the start, whose freed memory is not needed again. Every operation of a CPU step allocates its result,
    and fresh pages cost a fault each: 8 % of the quickstart's step (2 cores, medians of 3). A no-op with another C
    library.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def use_threads(config: ComputeConfig, device: torch.device) -> None:
    """Set torch's number of threads, if the run sets it and computes on a CPU."""
    if config.threads is not None and device.type == "cpu":
        torch.set_num_threads(config.threads)


def choose_device(config: ComputeConfig) -> torch.device:
    """Return the configured device and make it current, so that no rank touches another's GPU.

    Raises:
        ConfigError: torch sees no GPU where one is configured or installed; the machine has fewer GPUs than ranks; or
            torch lacks kernels for the GPU.
    """
    if not uses_gpu(config.device, "compute.device"):
        return torch.device("cpu")
    local_rank = from_launcher("LOCAL_RANK", 0)
    device = torch.device("cuda", gpu_of_rank(local_rank, torch.cuda.device_count(), os.environ))
    torch.cuda.set_device(device)  # first: collectives and kernels run on the current device
    _refuse_older(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return device


def be_deterministic() -> None:
    """Make this process's GPU sum in a fixed order; call it before the first product and before NCCL connects.

    Torch then takes the deterministic form of each operation, attention's backward pass included, and refuses
    operations without one. cuBLAS uses workspaces of one size, the compiler selects kernels by rule instead of by
    timing, and NCCL does not use NVLS, which sums in the switch in order of arrival.
    """
    import torch._inductor.config

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch._inductor.config.deterministic = True
    torch.use_deterministic_algorithms(True)
    # our code never reads uninitialised memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _refuse_older(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError if this torch lacks kernels for so old a GPU; the first kernel's own error would not name it.

    AMD's names (gfx90a, gfx942) are not ordered by age.
    """
    if torch.version.hip is not None:
        return
    oldest = min(int(re.sub(r"\D", "", arch)) for arch in torch.cuda.get_arch_list())  # sm_75, sm_90a
    if capability[0] * 10 + capability[1] < oldest:
        raise ConfigError(
            f"{name} has capability {capability[0]}.{capability[1]}, and torch {torch.__version__} has kernels for "
            f"{oldest // 10}.{oldest % 10} and newer. Install a torch built for an older CUDA, or set "
            "compute.device=cpu."
        )


def resolve_precision(config: ComputeConfig, device: torch.device) -> str:
    """Return Composer's name of the precision: bf16 autocast over fp32 weights on GPUs with bf16, else fp32.

    A CPU uses bf16 only if it is configured.

    Raises:
        ConfigError: bf16 is configured and unsupported here, or configured for the residual only.
    """
    if takes_bf16(config.precision, "compute.precision", on_gpu=device.type == "cuda"):
        return "amp_bf16"
    if config.residual_precision == "bf16":
        raise ConfigError(
            f"compute.residual_precision=bf16: products are in fp32 here, by compute.precision={config.precision}. Set "
            "compute.precision=bf16, or compute.residual_precision=fp32."
        )
    return "fp32"


@dataclass(frozen=True)
class Compute:
    """Device and precision of a process.

    Attributes:
        device: where the model is.
        precision: amp_bf16 or fp32, Composer's names; on a CPU Composer itself always gets fp32.
    """

    device: torch.device
    precision: str

    @classmethod
    def of(cls, config: ComputeConfig) -> Compute:
        """Return the configured device and precision, or the best ones; raise ConfigError if they are unavailable."""
        device = choose_device(config)
        if config.deterministic and device.type == "cuda":
            be_deterministic()
        return cls(device, resolve_precision(config, device))

    @property
    def bf16(self) -> bool:
        """True if products are computed in bf16, by autocast."""
        return self.precision == "amp_bf16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context with bf16 products over fp32 weights, if configured."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()
