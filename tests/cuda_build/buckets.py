"""Compiled layers alone and under DDP, on the null device: python -m tests.cuda_build.buckets SIZE ...

Their gradients fill several of DDP's buckets, at whose boundaries torch would split each layer's graph. This process is
rank 0 of two; the other rank's contributions equal its own. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed

from benchmarks.batches import mean_loss
from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModernBertConfig
from modernbert_train.train.composer_internals import replicate
from tests.cuda_build.layers import Traffic, graphs, on_device
from tests.cuda_build.null import Account, faults
from tests.support.gpu_parts import make_batch

WIDTHS = {
    "base": {"hidden_size": 768, "num_heads": 12, "intermediate_size": 1152},
    "large": {"hidden_size": 1024, "num_heads": 16, "intermediate_size": 2624},
}
ROW, ROWS = 1024, 4


def look_at(size: str, strategy: str, traffic: Traffic) -> dict[str, Any]:
    """Run three microbatches: DDP chooses its buckets with the first, and the last is counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = ModernBertConfig(num_layers=5, **WIDTHS[size])
    model = on_device(config, MaskedLmConfig(), ComputeConfig(attention="varlen", compile=True))
    called = replicate(model, False) if strategy == "ddp" else model
    account = Account()
    for _ in range(3):
        traffic.launches.clear()
        traffic.bytes.clear()
        account.reset()
        batch = make_batch([1000] * ROWS, ROW, config.vocab_size, boundaries=64, rows=ROWS)
        with torch.autocast("cuda", torch.bfloat16):
            mean_loss(called, batch).backward()
        model.zero_grad()
    found = account.read()
    return {
        "graphs": graphs(),
        "launches": sum(traffic.launches.values()),
        "bytes_per_token": round(sum(traffic.bytes.values()) / (ROW * ROWS)),
        "all_reduces": sum(times for name, (times, _) in found.items() if name.startswith("nccl allReduce")),
        "faults": faults(found),
    }


if __name__ == "__main__":
    distributed._verify_param_shape_across_processes = lambda *_, **__: None  # it would read from the device
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
    seen = Traffic()
    print(json.dumps({size: {form: look_at(size, form, seen) for form in ("alone", "ddp")} for size in sys.argv[1:]}))
    sys.stdout.flush()
    os._exit(0)  # without cleanup: a group of two would wait for the other rank
