"""Everything private of Composer 0.32.1 that we override, patch or call, and nothing else.

INTERNALS lists each with the signature that this file was written for; a test compares it with what is installed, so
that an upgrade of Composer prints a table of what has moved. `install` applies the patches.
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

# where it is -> its signature in Composer 0.32.1; "property", or empty where it is an attribute of instances
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
    """Apply the patches; calling it again does nothing more."""
    # A Trainer asks for the processor's name, which nothing here uses, by starting another Python that searches the
    # machine for it: a second at each start of each rank.
    collect_env.get_cpu_model = platform.machine
    # For a model on the meta device Composer asks for CUDA memory, whatever the device is.
    prepare_distributed.meta_init = give_memory
    # To shard, Composer makes the device anew, from LOCAL_RANK and with TF32: a launcher may show each rank one GPU.
    prepare_distributed.get_device = shared_utils.get_device = own_device
    # The Trainer has no argument for how it replicates.
    composer_trainer.prepare_ddp_module = replicate


def composer_device(device: torch.device) -> Device:
    """The device as Composer knows it, with fp32 meaning fp32: by itself Composer turns TF32 on, which has ten bits."""
    if device.type != "cuda":
        return get_device(device.type)
    gpu = DeviceGPU(device.index, allow_tf32=False)
    gpu.dist_backend = BACKENDS["cuda"]  # Composer compares it with the group that there is
    return gpu


def composer_precision(device: torch.device, precision: str) -> str:
    """The precision as Composer may hear it: on a CPU it refuses all but fp32. Autocast is the step's own; see step.py.

    Args:
        device: of the run.
        precision: of the run, by Composer's name.
    """
    return "fp32" if device.type == "cpu" else precision


def own_device(device: str | Device | None = None) -> Device:
    """The device that this process computes on; Composer asks without naming one."""
    on_gpu = torch.cuda.is_initialized()
    return composer_device(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))


def close(trainer: Trainer) -> None:
    """Close its loggers and callbacks; not `Trainer.close`, which would wait for ranks that have failed."""
    trainer.engine.close()
    atexit.unregister(trainer.engine._close)  # else all is closed once more, and kept in memory until then


def give_memory(module: nn.Module, param_init_fn: Callable[[nn.Module], None] | None = None) -> None:
    """Memory for every rank's shards, of undefined content, after `fully_shard` on the meta device."""
    assert param_init_fn is None, "weights are drawn when the model has its memory"
    parameter = next(module.parameters())
    assert isinstance(parameter, DTensor)
    module.to_empty(device=parameter.device_mesh.device_type)


def replicate(module: nn.Module, find_unused_parameters: bool) -> nn.Module:
    """DDP whose gradients lie in the buckets themselves, so that they are not copied back after the all-reduce.

    That saves 8 bytes of memory traffic for each parameter, and after the backward pass the room of a second copy.
    Nothing is broadcast from rank 0: the weights come later, the same on every rank (`models.init`, `weights/source`,
    a checkpoint), and a second copy of them on the device would have no use.

    Where a phase leaves parameters idle, on all ranks alike, DDP finds them and leaves their gradients None. It does
    so with the last microbatch of a step, which it reduces with; the others have the same.
    """
    unused = find_unused_parameters or getattr(module, "idles", False)
    return FixedBuckets(module, find_unused_parameters=unused, gradient_as_bucket_view=True, init_sync=False)


@contextmanager
def without_broadcasts() -> Iterator[None]:
    """What one rank broadcasts from itself it already has, so nothing is lost to it."""
    broadcast = dist.broadcast_object_list
    dist.broadcast_object_list = lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.broadcast_object_list = broadcast


class CurrentWandB(WandBLogger):
    """Composer's W&B logger for today's wandb: it asks for Run.get_url(), of which wandb 0.31 has left only `url`."""

    def init(self, state: State, logger: Logger) -> None:
        from wandb.sdk.wandb_run import Run

        if not hasattr(Run, "get_url"):
            Run.get_url = lambda run: run.url
        super().init(state, logger)


class Sharding(FSDP2Config):
    """FSDP2 within groups of ranks, each of which holds a whole copy of the weights; one group is plain FSDP2.

    Composer 0.32.1 has a field for the mesh of ranks, and replaces what stands there with one group of all ranks, in
    silence. It makes that mesh out of these two degrees, which FSDP2Config fixes.

    Under bf16 the weights are gathered in fp32 and autocast does all the rest, as it does under DDP: then both have the
    very same gradient. Composer's default casts what goes into each layer as well, and a residual stream of bf16 made
    the gradient's error 2.8 times larger (7 layers, on a CPU: 1.1 % of its norm, where autocast alone has 0.4 %).

    What lies outside the layers stays gathered from the forward to the backward pass, as torch would have it.
    Composer's default frees it in between and gathers it twice, though it is needed first of all in the backward pass.
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
    """A Trainer with our loop in the place of its own.

    In each step Composer 0.32.1 has six collectives and waits for the device as often: whether any rank is out of
    data, how much they have, the loss, the number of rows and of tokens, the time. The plan of a batch, which every
    rank has, says nearly all of that; see step.py.

    Attributes:
        loop: trains until the run ends; set before `fit`.
    """

    loop: Callable[[], None]

    def _train_loop(self) -> None:
        self.loop()
