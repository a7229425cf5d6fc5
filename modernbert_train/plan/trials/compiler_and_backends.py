"""Try the compiler, the fused optimizer and collectives, each in its smallest form."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.models.attention.written_out import TOLERANCES, require_equal
from modernbert_train.models.layers import GeGLU, layer_norm
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.plan.trials.attention import usual

OPTIMIZER_STEPS = 3


def try_compile() -> str:
    """Compare a norm and a small feed-forward block, compiled as `compute.compile` does, with the eager version.

    Raises:
        ArithmeticError: the output or a gradient is wrong.
    """
    device, dtype = usual()
    torch.manual_seed(0)
    config = ModernBertConfig(hidden_size=64, num_heads=1, intermediate_size=32)
    plain = nn.Sequential(layer_norm(config), GeGLU(config)).to(device)
    compiled = copy.deepcopy(plain)
    compiled.compile(dynamic=False)
    x_TD = torch.randn(64, config.hidden_size, device=device)
    results: list[list[Any]] = []
    for block in (plain, compiled):
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            out_TD = block(x_TD)
        out_TD.float().square().sum().backward()
        results.append([out_TD, *(parameter.grad for parameter in block.parameters())])
    worst = require_equal(results[1], results[0], TOLERANCES[dtype])
    return f"a feed-forward block within {worst:.0e} of the same not compiled"


def try_fused() -> str:
    """Compare a few steps of `optim.fused` with the unfused optimizer.

    Raises:
        ArithmeticError: a weight is wrong.
    """
    device, _ = usual()
    weights = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in ((33, 65), (7,))]
        optimizer = StableAdamW(params, 1e-2, weight_decay=0.1, fused=fused)
        for _ in range(OPTIMIZER_STEPS):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(device)
            optimizer.step()
        weights.append(params)
    worst = require_equal(weights[1], weights[0], 1e-5)
    return f"{OPTIMIZER_STEPS} steps within {worst:.0e} of the same not fused"


def try_backend(name: str) -> str:
    """Sum over one process.

    Raises:
        ArithmeticError: it is wrong.
    """
    device = torch.device("cuda", 0) if name == "nccl" else torch.device("cpu")
    store = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
    dist.init_process_group(name, store=store, rank=0, world_size=1)
    try:
        ones = torch.ones(8, device=device)
        dist.all_reduce(ones)
        require_equal([ones], [torch.ones(8)], 0.0)
    finally:
        dist.destroy_process_group()
    return "a sum over one process; the network between several was not tried"
