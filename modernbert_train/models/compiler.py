"""Settings of torch.compile for this process, made before its first use."""

from __future__ import annotations

import torch._dynamo
import torch._inductor.config

# Shapes are static, so each kind of layer has a graph for each shape, in training and in evaluation: six kinds at most
# (replaced-token detection has two encoders), which leaves room for 21 shapes.
MOST_GRAPHS = 128


def set_up_compiler() -> None:
    """Settings without which compiled layers are slow, or hang, in silence."""
    # layers are compiled inside DDP's forward, where torch would cut each at the bounds of DDP's buckets: large moved
    # 13 % more bytes and kept 3.2 GB more. Overlap stays, since each layer is a graph of its own
    torch._dynamo.config.optimize_ddp = False
    # its launches hold the GIL: in a full queue behind a collective whose rank has failed, no thread of this process
    # would hear of it
    torch._inductor.config.use_static_cuda_launcher = False
    # a gradient that joins parts, as GeGLU's and rotary's, would compute each part for all places and mask: on an H200
    # their kernels took three times as long as their bytes need. Written into slices, both parts are computed once
    if hasattr(torch._inductor.config, "max_complex_pointwise_cat_inputs"):  # from torch 2.13 on
        torch._inductor.config.max_complex_pointwise_cat_inputs = 1
    # beyond the limit torch runs the layer eagerly; eight by default, and a warning among many
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
