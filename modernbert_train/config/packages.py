"""Find packages and programs that a run requests and this environment lacks, without importing them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from modernbert_train.config.callbacks import PACKAGES
from modernbert_train.config.schema import ComputeConfig, OptimConfig, StableAdamWConfig

_FLASH = ("flash_attn", "flash_attn_interface")
# first release of flash-attn-4 with every known fix of races in gradients (flash-attention #2481, #2510, #2756)
FLASH_4_OLDEST = "4.0.0b26"
FLASH_4_INSTALL = f"pip install --upgrade 'flash-attn-4[cu13]>={FLASH_4_OLDEST}'"  # as the extra `flash` installs it


def missing_packages(
    compute: ComputeConfig,
    optim: OptimConfig,
    callbacks: Iterable[str],
    loggers: Iterable[str],
    *,
    on_gpu: bool = False,
) -> Iterator[str]:
    """Yield a message for each missing package that a section requests by name.

    Args:
        compute, optim, callbacks, loggers: of the run.
        on_gpu: True if compute.device=auto means a GPU here.
    """
    yield from missing_for("callbacks", callbacks)
    yield from missing_for("loggers", loggers)
    yield from missing_kernels(compute)
    yield from missing_compiler(compute, on_gpu=on_gpu)
    yield from missing_fused(optim)


def missing_for(section: str, names: Iterable[str]) -> Iterator[str]:
    """Check the packages of the callbacks or the loggers."""
    for name in names:
        package = PACKAGES.get(name)
        if package is not None and not _is_there(package):
            yield (
                f"{section}.{name}: the package {package} is not installed. Install it with pip (pip install "
                f"{package}), or set {section}.{name}=false."
            )


def missing_kernels(compute: ComputeConfig) -> Iterator[str]:
    """Check the packages of attention kernels; whether one fits the GPU is checked when the model is built."""
    kernels = {"compute.attention": compute.attention, "compute.global_attention": compute.global_attention}
    for key, kernel in kernels.items():
        if kernel == "flash" and not any(map(_is_there, _FLASH)):
            yield (
                f"{key}=flash: no FlashAttention is installed ({', '.join(_FLASH)}). Install one that fits your torch "
                f"and GPU ({FLASH_4_INSTALL}), or set {key}=auto."
            )
        elif kernel == "flash" and not _is_there("flash_attn_interface") and installed_version("flash-attn") is None:
            reason = flash_4_refusal()  # the folder flash_attn can only be version 4's
            if reason is not None:
                yield f"{key}=flash: {reason} Or set {key}=auto."
        if kernel in ("flex", "tiles"):
            yield from _refusals(f"{key}={kernel}", f"{key}=auto")


def flash_4_refusal() -> str | None:
    """Return why the installed flash-attn-4 must not be used, None if it may be; it is not imported."""
    installed = installed_version("flash-attn-4")
    if installed is None:
        return f"the package flash-attn-4 is not installed. Install it: {FLASH_4_INSTALL}."
    if Version(installed) < Version(FLASH_4_OLDEST):
        return (
            f"flash-attn-4 {installed} is older than {FLASH_4_OLDEST}, and older ones return wrong gradients without "
            f"an error. Install a newer one: {FLASH_4_INSTALL}."
        )
    return None


def missing_compiler(compute: ComputeConfig, *, on_gpu: bool = False) -> Iterator[str]:
    """Check the tools of torch.compile: on a CPU a C++ compiler, on a GPU Triton's requirements."""
    if not compute.compile:
        return
    if compute.device == "cuda" or (compute.device == "auto" and on_gpu):
        yield from _refusals("compute.compile=true", "compute.compile=false")
        return
    needed = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    if compute.device == "auto":
        needed += _c_compilers()
    if not any(map(shutil.which, needed)):
        yield (
            f"compute.compile=true: there is no compiler here ({', '.join(needed)}). Install one (on Debian and "
            "Ubuntu: apt install g++), or set compute.compile=false."
        )


def missing_fused(optim: OptimConfig) -> Iterator[str]:
    """Check Triton's requirements for a fused StableAdamW; the fused form of AdamW is part of torch."""
    if optim.fused and isinstance(optim, StableAdamWConfig):
        yield from _refusals("optim.fused=true", "optim.fused=false")


def missing_on_gpu() -> list[str]:
    """Return what this machine lacks for compiled layers and fused kernels on a GPU, each with its remedy."""
    missing = []
    if not _is_there("triton"):
        missing.append("Triton is not installed (CUDA builds of torch have it)")
    if not any(map(shutil.which, _c_compilers())):
        names = ", ".join(_c_compilers())
        missing.append(f"there is no C compiler ({names}; on Debian and Ubuntu: apt install gcc)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():  # Triton compiles kernel launchers with them
        missing.append("Python's headers are not installed (on Debian and Ubuntu: apt install python3-dev)")
    return missing


def _refusals(setting: str, instead: str) -> Iterator[str]:
    """Yield a message for each missing requirement of a setting that needs Triton."""
    for lack in missing_on_gpu():
        yield f"{setting}: {lack}. Install what is missing, or set {instead}."


def _c_compilers() -> list[str]:
    return [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
