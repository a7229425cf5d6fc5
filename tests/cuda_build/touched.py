"""Memory that is used while it is being copied, on the null device: python -m tests.cuda_build.touched."""

from __future__ import annotations

import ctypes
import json
import math
import os

import torch

from tests.cuda_build.null import Account, faults


def copy_from(host: torch.Tensor, *, touch: bool) -> list[str]:
    """Return the faults of a copy from pinned memory that is changed during the copy, or after."""
    account = Account()
    account.reset()
    device = torch.empty(host.shape, device="cuda")
    device.copy_(host, non_blocking=True)
    if touch:
        host[3] = 7.0
    torch.cuda.synchronize()
    host[4] = 7.0
    return faults(account.read())


def free_early() -> list[str]:
    """Return the faults of pinned memory freed during a copy; torch's own allocator keeps it until the end."""
    device = ctypes.CDLL(os.environ["LD_PRELOAD"])
    account, host, size = Account(), ctypes.c_void_p(), 4096
    account.reset()
    device.cudaHostAlloc(ctypes.byref(host), ctypes.c_size_t(size), 0)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    to_device, legacy_stream = 1, None
    device.cudaMemcpyAsync(ctypes.c_void_p(there.data_ptr()), host, ctypes.c_size_t(size), to_device, legacy_stream)
    device.cudaFreeHost(host)
    torch.cuda.synchronize()
    return faults(account.read())


def main() -> None:
    host = torch.zeros(1024, pin_memory=True)
    waited, changed = copy_from(host, touch=False), copy_from(host, touch=True)
    back = torch.zeros(1024, pin_memory=True)
    back.copy_(torch.ones(1024, device="cuda"), non_blocking=True)
    early = math.isnan(float(back[0]))
    torch.cuda.synchronize()
    late = float(back[0])
    print(json.dumps({"waited": waited, "changed": changed, "freed": free_early(), "early": early, "late": late}))


if __name__ == "__main__":
    main()
