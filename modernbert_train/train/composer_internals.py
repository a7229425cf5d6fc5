"""All private parts of Composer 0.32.1 that we override, patch or call.

INTERNALS lists each one with the signature that this file was written for. A test compares them with the installed
version, so an upgrade of Composer prints a table of differences. `install` applies the patches.
"""

from __future__ import annotations

import atexit
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from composer import Trainer
from composer.core import State
from composer.devices import Device, DeviceGPU
from composer.distributed import prepare_distributed, shared_utils
from composer.loggers import Logger, WandBLogger
from composer.trainer import trainer as composer_trainer
from composer.utils import collect_env, dist, get_device
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.tensor import DTensor

from modernbert_train.core.torch_internals import FixedBuckets
from modernbert_train.distributed.group import BACKENDS

# location -> signature in Composer 0.32.1; "property", or empty for an attribute of instances
INTERNALS = {
    # overridden
    "composer.trainer.trainer.Trainer._train_loop": "(self) -> 'None'",
    "composer.utils.parallelism.FSDP2Config.data_parallel_replicate_degree": "property",
    "composer.utils.parallelism.FSDP2Config.data_parallel_shard_degree": "property",
    "composer.loggers.wandb_logger.WandBLogger.init": "(self, state: 'State', logger: 'Logger') -> 'None'",
    # replaced
    "composer.utils.collect_env.get_cpu_model": "() -> str",
    "composer.distributed.prepare_distributed.meta_init": (
        "(module: torch.nn.modules.module.Module, param_init_fn: "
        "Optional[Callable[[torch.nn.modules.module.Module], NoneType]] = None) -> None"
    ),
    "composer.distributed.prepare_distributed.get_device": (
        "(device: Union[str, ForwardRef('Device'), NoneType] = None) -> 'Device'"
    ),
    "composer.distributed.shared_utils.get_device": (
        "(device: Union[str, ForwardRef('Device'), NoneType] = None) -> 'Device'"
    ),
    "composer.trainer.trainer.prepare_ddp_module": (
        "(module: torch.nn.modules.module.Module, find_unused_parameters: bool) -> torch.nn.modules.module.Module"
    ),
    "composer.utils.dist.broadcast_object_list": "(object_list: 'list[Any]', src: 'int' = 0, group=None) -> 'None'",
    # called
    "composer.core.engine.Engine._close": "(state: 'State', logger: 'Logger')",
}


def install() -> None:
    """Apply the patches; a second call has no effect."""
    # The Trainer looks up the CPU's name by starting another Python that searches the machine: a second at each start
    # of each rank, for a name that we never use.
    collect_env.get_cpu_model = platform.machine
    # Composer allocates CUDA memory for a model on the meta device, even for a run on a CPU.
    prepare_distributed.meta_init = give_memory
    # When sharding, Composer recreates the device from LOCAL_RANK with TF32 on; a launcher may show each rank one GPU.
    prepare_distributed.get_device = shared_utils.get_device = own_device
    # The Trainer offers no argument for its DDP settings.
    composer_trainer.prepare_ddp_module = replicate


def composer_device(device: torch.device) -> Device:
    """Return Composer's device, with true fp32: Composer's default turns on TF32, with a 10-bit mantissa."""
    if device.type != "cuda":
        return get_device(device.type)
    gpu = DeviceGPU(device.index, allow_tf32=False)
    gpu.dist_backend = BACKENDS["cuda"]  # Composer compares it with the backend of the process group
    return gpu


def composer_precision(device: torch.device, precision: str) -> str:
    """Return the precision to pass to Composer, which accepts only fp32 on a CPU. The step itself runs autocast.

    Args:
        device: the run's device.
        precision: the run's precision, by Composer's name.
    """
    return "fp32" if device.type == "cpu" else precision


def own_device(device: str | Device | None = None) -> Device:
    """Return the device that this process computes on; Composer calls this without an argument."""
    on_gpu = torch.cuda.is_initialized()
    return composer_device(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def close(trainer: Trainer) -> None:
    """Close loggers and callbacks. `Trainer.close` is not called: it would wait for ranks that have failed."""
    trainer.engine.close()
    atexit.unregister(trainer.engine._close)  # it would close everything again, and keep it in memory until exit


def give_memory(module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None = None) -> None:
    """Allocate every rank's shards, uninitialised, after `fully_shard` on the meta device."""
    assert param_init_fn is None, "weights are drawn when the model has its memory"
    parameter = next(module.parameters())
    assert isinstance(parameter, DTensor)
    module.to_empty(device=parameter.device_mesh.device_type)


def replicate(module: nn.Module, find_unused_parameters: bool) -> nn.Module:
    """Wrap a model in DDP with gradients as views of the buckets, so nothing is copied back after the all-reduce.

    That saves 8 bytes of memory traffic for each parameter, and a second copy of the gradients after the backward pass.
    Rank 0 does not broadcast its weights: they are filled in later, equal on every rank (`models.init`,
    `weights/source`, a checkpoint).

    If a phase leaves the same parameters unused on all ranks, DDP finds them and leaves their gradients None. It looks
    at the last microbatch of a step only, where it reduces; the other microbatches use the same parameters.
    """
    unused = find_unused_parameters or getattr(module, "idles", False)
    return FixedBuckets(module, find_unused_parameters=unused, gradient_as_bucket_view=True, init_sync=False)


@contextmanager
def without_broadcasts() -> Iterator[None]:
    """Skip Composer's broadcasts on the only rank that calls this; it already has the values it would broadcast."""
    broadcast = dist.broadcast_object_list
    dist.broadcast_object_list = lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.broadcast_object_list = broadcast


class CurrentWandB(WandBLogger):
    """Composer's W&B logger for current wandb: it calls Run.get_url(), which wandb 0.31 replaced with `url`."""

    def init(self, state: State, logger: Logger) -> None:
        from wandb.sdk.wandb_run import Run

        if not hasattr(Run, "get_url"):
            Run.get_url = lambda run: run.url
        super().init(state, logger)


class Sharding(FSDP2Config):
    """FSDP2 within groups of ranks, each holding one copy of the weights (HSDP); one group is plain FSDP2.

    Composer 0.32.1 has a field for the device mesh, and silently overwrites it with one group of all ranks. It builds
    that mesh from these two degrees, which FSDP2Config fixes.

    Under bf16 the weights are gathered in fp32 and autocast does the rest, as under DDP, so both have exactly the same
    gradient. Composer's default also casts the inputs of each layer; a residual stream in bf16 made the gradient's
    error 2.8 times larger (7 layers, on a CPU: 1.1 % of its norm, against 0.4 % with autocast alone).

    Parameters outside the layers stay gathered from the forward to the backward pass, which is torch's default.
    Composer's default frees them in between and gathers them twice, though the backward pass uses them first.
    """

    def __init__(self, num_ranks: int, shard_ranks: int) -> None:
        super().__init__(state_dict_type="full", mixed_precision="FULL")
        self.reshard_after_forward = None
        self._degrees = (num_ranks // shard_ranks, shard_ranks)

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        return self._degrees[0] if self._degrees[0] > 1 else None

    @property
    def data_parallel_shard_degree(self) -> int:
        return self._degrees[1]


class LoopTrainer(Trainer):
    """A Trainer that runs our loop.

    In each step Composer 0.32.1 has six collectives and as many host syncs: whether any rank is out of data, the
    amount of data, the loss, the number of rows, the number of tokens, the time. Every rank already has most of these
    from the plan of the batch; see step.py.

    Attributes:
        loop: trains until the run ends; set before `fit`.
    """

    loop: Callable[[], None]

    def _train_loop(self) -> None:
        self.loop()
