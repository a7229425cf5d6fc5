"""Table of the trials, with reasons why each may be unusable here, and remedies."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from modernbert_train.config.packages import FLASH_4_INSTALL
from modernbert_train.models.attention import kernel_report
from modernbert_train.plan.trials import MARK
from modernbert_train.plan.trials.attention import try_attention
from modernbert_train.plan.trials.compiler_and_backends import try_backend, try_compile, try_fused

GPU = "an NVIDIA GPU of capability 8.0 or newer, and the CUDA build of torch"
COMPILER = "a C++ compiler (on Debian and Ubuntu: apt install g++)"


@dataclass(frozen=True)
class Trial:
    """Something that a run may compute with.

    Attributes:
        label: the usual name.
        remedy: requirements to make it usable.
        run: tries it and returns a sentence; an exception is the reason why it is not usable.
        refusal: returns the reason why it cannot work here, if known without trying.
        seconds: time after which it counts as hung.
    """

    label: str
    remedy: str
    run: Callable[[], str]
    refusal: Callable[[], str | None]
    seconds: int = 100


def _kernel(name: str, remedy: str) -> Trial:
    return Trial(f"attention kernel {name}", remedy, partial(try_attention, name), lambda: kernel_report()[name])


def _gpu_and_triton() -> str | None:
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


def _gloo() -> str | None:
    return None if dist.is_available() and dist.is_gloo_available() else "this torch is built without it"


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    return None if dist.is_available() and dist.is_nccl_available() else "this torch is built without it"


TRIALS: dict[str, Trial] = {
    "varlen": _kernel("varlen", GPU),
    "flash": _kernel("flash", f"{GPU}, and a FlashAttention package; for capability 9.0 and newer: {FLASH_4_INSTALL}"),
    "flex": _kernel("flex", f"{GPU}, which brings Triton"),
    "sdpa": _kernel("sdpa", "install modernbert-train into a new environment"),
    "tiles": _kernel("tiles", f"{GPU}, which brings Triton"),
    "cudnn": _kernel("cudnn", f"{GPU}, of capability 9 or 10, and torch 2.15 with its cuDNN"),
    "compile": Trial("compute.compile", COMPILER, try_compile, lambda: None, seconds=150),
    "fused": Trial("optim.fused", f"{GPU}, which brings Triton", try_fused, _gpu_and_triton),
    "gloo": Trial(
        "distributed backend gloo",
        "install modernbert-train into a new environment",
        partial(try_backend, "gloo"),
        _gloo,
    ),
    "nccl": Trial("distributed backend nccl", GPU, partial(try_backend, "nccl"), _nccl),
}


def answer(name: str) -> None:
    """Run a trial in this process and print its outcome."""
    try:
        outcome = (True, TRIALS[name].run())
    except Exception as error:  # any failure is an outcome of a trial
        outcome = (False, f"{type(error).__name__}: {error}")
    print(f"{MARK}{json.dumps(outcome)}", flush=True)
