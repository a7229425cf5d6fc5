"""Settings of torch.compile for this process, and regions: methods that are compiled in addition to the layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch._dynamo
import torch._inductor.config
from torch import nn

Method = TypeVar("Method", bound=Callable[..., Any])
REGIONS = "_compiled_regions"  # attribute of a module: name of a method -> the compiled function

# Shapes are static, so each kind of layer has a graph for each shape, in training and in evaluation: six kinds at most
# (replaced-token detection has two encoders), which allows 21 shapes.
MAX_GRAPHS = 128


def set_up_compiler() -> None:
    """Apply the settings without which compiled layers are slow or hang without a message."""
    # layers are compiled inside DDP's forward, where torch would split each graph at DDP's bucket boundaries: large
    # moved 13 % more bytes and kept 3.2 GB more. Communication still overlaps, since each layer is its own graph
    torch._dynamo.config.optimize_ddp = False
    # the static launcher holds the GIL: with a full queue behind a collective whose rank has failed, no thread of this
    # process could react
    torch._inductor.config.use_static_cuda_launcher = False
    # a gradient that concatenates parts, as GeGLU's and rotary's, would compute each part at all positions and mask: on
    # an H200 these kernels took three times their memory-bound time. Writing into slices computes each part once
    if hasattr(torch._inductor.config, "max_complex_pointwise_cat_inputs"):  # from torch 2.13 on
        torch._inductor.config.max_complex_pointwise_cat_inputs = 1
    # beyond the limit (eight by default) torch silently runs the layer eagerly; raise instead
    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def set_search(search: bool) -> None:
    """Apply compute.search to everything compiled from now on.

    Inductor's caches are keyed by its settings, so they keep the kernels of both settings.
    """
    torch._inductor.config.coordinate_descent_tuning = search


def region(method: Method) -> Method:
    """Mark a module's method as a region, which `compile_regions` compiles as one graph, in place.

    The compiled function receives the module as an argument, so a copy of the module computes with its own weights.
    """

    @functools.wraps(method)
    def call(module: nn.Module, *args: Any) -> Any:
        compiled = vars(module).get(REGIONS, {}).get(method.__name__, method)
        return compiled(module, *args)

    vars(call)["region"] = method
    return call  # type: ignore[return-value]


def compile_regions(module: nn.Module, **options: Any) -> None:
    """Compile the regions of a module, but not of its submodules.

    Args:
        module: its class has methods marked by `region`.
        options: for torch.compile.
    """
    methods = ((name, getattr(getattr(type(module), name), "region", None)) for name in dir(type(module)))
    vars(module)[REGIONS] = {
        name: torch.compile(method, dynamic=False, **options) for name, method in methods if method is not None
    }
