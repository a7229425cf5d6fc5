"""Which packages a run needs by name and this environment lacks; they are looked for, and not imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from modernbert_train.config.plugins import PACKAGES
from modernbert_train.config.schema import OptimConfig, RunConfig

_FLASH = ("flash_attn", "flash_attn_interface")


def missing_packages(config: RunConfig) -> Iterator[str]:
    """Everything that is asked for by name and is not there, for all sections."""
    for section in ("callbacks", "loggers"):
        yield from missing_plugins(config, section)
    yield from missing_kernels(config)
    yield from missing_fused(config.optim)


def missing_plugins(config: RunConfig, section: str) -> Iterator[str]:
    """Packages of the callbacks or the loggers."""
    for name in getattr(config, section):
        package = PACKAGES.get(name)
        if package is not None and not _is_there(package):
            yield (
                f"{section}.{name}: the package {package} is not installed. Install it with pip, or set "
                f"{section}.{name}=false."
            )


def missing_kernels(config: RunConfig) -> Iterator[str]:
    """Packages of attention kernels; whether one that is there fits the GPU is asked when the model is built."""
    compute = config.compute
    kernels = {"compute.attention": compute.attention, "compute.global_attention": compute.global_attention}
    for key, kernel in kernels.items():
        if kernel == "flash" and not any(map(_is_there, _FLASH)):
            yield (
                f"{key}=flash: no FlashAttention is installed ({', '.join(_FLASH)}). Install one that fits your torch "
                f"and GPU, or set {key}=auto."
            )
        if kernel == "flex" and not _is_there("triton"):
            yield (
                f"{key}=flex: Triton, which compiles it, is not installed; CUDA builds of torch have it. Set "
                f"{key}=auto."
            )


def missing_fused(optim: OptimConfig) -> Iterator[str]:
    """Triton, if the optimizer is to be fused."""
    if getattr(optim, "fused", False) and not _is_there("triton"):
        yield "optim.fused=true: Triton is not installed; CUDA builds of torch have it. Set optim.fused=false."


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
