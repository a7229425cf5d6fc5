"""Memory that is used while it is being copied, on the null device: python -m tests.cuda_build.touched."""

from __future__ import annotations

import json
import math

import torch

from tests.cuda_build.null import Account, faults


def copy_from(host: torch.Tensor, *, touch: bool) -> list[str]:
    """The faults of a copy from pinned memory that is changed while it is under way, or after."""
    account = Account()
    account.reset()
    device = torch.empty(host.shape, device="cuda")
    device.copy_(host, non_blocking=True)
    if touch:
        host[3] = 7.0
    torch.cuda.synchronize()
    host[4] = 7.0
    return faults(account.read())


def main() -> None:
    host = torch.zeros(1024, pin_memory=True)
    waited, changed = copy_from(host, touch=False), copy_from(host, touch=True)
    back = torch.zeros(1024, pin_memory=True)
    back.copy_(torch.ones(1024, device="cuda"), non_blocking=True)
    early = math.isnan(float(back[0]))
    torch.cuda.synchronize()
    print(json.dumps({"waited": waited, "changed": changed, "early": early, "late": float(back[0])}))


if __name__ == "__main__":
    main()
