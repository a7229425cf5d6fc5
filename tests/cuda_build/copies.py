"""The copies of a checkpoint, on GPU 1 of two null devices: python -m tests.cuda_build.copies."""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import torch

from modernbert_train.config.schema import ComputeConfig, ModernBertConfig, StableAdamWConfig
from modernbert_train.distributed.compute import choose_device
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.optim.optimizers import build_optimizer
from modernbert_train.weights.shares import Copier

SIZE = ModernBertConfig(vocab_size=512, hidden_size=64, num_layers=3, num_heads=2, intermediate_size=96)


def has_context(gpu: int) -> bool:
    """Return whether this process has opened a context on a GPU."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    ctypes.CDLL(os.environ["LD_PRELOAD"]).cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def flags_of(address: int) -> list[str]:
    """Return the flags that the kernel has for the page at an address, such as `dc`: not copied by fork."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def awaiting_free() -> int:
    """Return how many freed blocks of GPU memory another stream still reads."""
    blocks: list[Any] = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    return sum(block["state"] == "active_pending_free" for block in blocks)


def main() -> None:
    device = choose_device(ComputeConfig(device="auto"))
    current = torch.cuda.current_device()
    model = ModernBertForMaskedLM(SIZE).to(device)
    optimizer = build_optimizer(StableAdamWConfig(lr=1e-3, fused=False), model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    copier = Copier(0, [0], 1)
    share, _ = copier.copy(model, optimizer)
    assert share is not None
    before = awaiting_free()
    optimizer.state.clear()  # like a phase that resets moments
    pending = awaiting_free() - before
    thread = threading.Thread(target=copier.wait)
    thread.start()
    thread.join()
    page = next(iter(share.weights.values())).data_ptr()
    found = {"device": str(device), "current": current, "pending": pending, "flags": flags_of(page)}
    print(json.dumps(found | {"gpu 0": has_context(0), "gpu 1": has_context(1)}))


if __name__ == "__main__":
    main()
