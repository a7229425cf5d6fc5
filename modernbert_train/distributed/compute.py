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
from modernbert_train.distributed.gpus import uses_gpu
from modernbert_train.distributed.shared_gpu import gpu_of_rank
from modernbert_train.errors import ConfigError


def release_freed_memory() -> None:
    """Have glibc give back what a start has freed between what it still needs. No effect with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next allocation instead of giving each large tensor back to the system.

    For the steps alone: what is freed before them is not needed again. Every operation of a CPU step allocates its
    result, and fresh pages cost a fault each: 8 % of the quickstart's step (2 cores, medians of 3). Has no effect with
    another C library.
    """
    mmap_max, trim_threshold = -4, -1  # the names' numbers in malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def use_threads(config: ComputeConfig, device: torch.device) -> None:
    """Have torch compute with as many threads as a run asks for, where it asks and computes on a CPU."""
    if config.threads is not None and device.type == "cpu":
        torch.set_num_threads(config.threads)


def choose_device(config: ComputeConfig) -> torch.device:
    """Return the device asked for, and make it the current one: no rank may touch the GPU of another.

    Raises:
        ConfigError: torch sees no GPU though one was asked for or is there; this machine has fewer GPUs than ranks; or
            torch has no kernels for it.
    """
    if not uses_gpu(config.device, "compute.device"):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", gpu_of_rank(local_rank, torch.cuda.device_count(), os.environ))
    torch.cuda.set_device(device)  # before anything else: collectives and kernels run on the current device
    _refuse_older(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return device


def be_deterministic() -> None:
    """Have this process's GPU add in the same order each time; before its first product and before NCCL connects.

    torch then takes the deterministic form of each operation, attention's backward pass among them, and refuses what
    has none. cuBLAS keeps to workspaces of one size, the compiler chooses by rule where it would choose by timing, and
    NCCL leaves out NVLS, which adds in the switch in whatever order numbers arrive.
    """
    import torch._inductor.config

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch._inductor.config.deterministic = True
    torch.use_deterministic_algorithms(True)
    # nothing here reads what it has not written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _refuse_older(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError if this torch has no kernels for so old a GPU: the first one would fail without its name.

    AMD's GPUs are named otherwise (gfx90a, gfx942), and old ones do not come in a row.
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
    """The precision by Composer's name: bf16 autocast over fp32 weights on GPUs that have bf16, else fp32.

    On a CPU only where bf16 is asked for.

    Raises:
        ConfigError: bf16 was asked for, of a processor or a GPU without it, or of the residual alone.
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
    """What a process computes with.

    Attributes:
        device: where the model is.
        precision: amp_bf16 or fp32, names of Composer, which is told fp32 on a CPU all the same.
    """

    device: torch.device
    precision: str

    @classmethod
    def of(cls, config: ComputeConfig) -> Compute:
        """What a run asks for, or what fits best; raises ConfigError if it is not to be had here."""
        device = choose_device(config)
        if config.deterministic and device.type == "cuda":
            be_deterministic()
        return cls(device, resolve_precision(config, device))

    @property
    def bf16(self) -> bool:
        """Whether products are computed in bf16, by autocast."""
        return self.precision == "amp_bf16"

    def autocast(self) -> AbstractContextManager[object]:
        """Products in bf16 over fp32 weights, if so."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()
