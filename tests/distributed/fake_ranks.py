"""One rank of many in this process: torch's fake process group, and a list of every collective that the rank calls.

No data is sent. A sum over ranks is this rank's own number, gathered values are copies of this rank's, and broadcasts
of rank 0 were recorded when rank 0 ran before: `Spoken` keeps them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from composer.devices import DeviceCPU
from torch import Tensor, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modernbert_train.train import composer_internals, session

PER_NODE = 8
# c10d's operation -> (our name of it, which argument holds the whole tensors)
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 0),
    "alltoall_": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "barrier": ("barrier", 0),
}


class Call(NamedTuple):
    """A collective of one rank.

    Attributes:
        kind: its name.
        ranks: of its group.
        apart: distance of two neighbours in the group.
        numbers: in the whole tensors.
        dtype: of the tensors.
    """

    kind: str
    ranks: int
    apart: int
    numbers: int
    dtype: torch.dtype


@dataclass
class Spoken:
    """Broadcasts of rank 0 to all others, in order, and the number that a rank has received."""

    words: list[Any] = field(default_factory=list)
    heard: int = 0


class Calls(TorchDispatchMode):
    """Lists the collectives within it.

    Attributes:
        calls: in order.
        groups: the ranks of each group that was used.
        meddle: is shown the tensors of each call, once it is done, and may change them.
    """

    def __init__(self, meddle: Callable[[Call, list[Tensor]], None] = lambda call, tensors: None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.groups: set[tuple[int, ...]] = set()
        self.meddle = meddle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            kind, whole = _KINDS[func._overloadpacket.__name__]
            ranks = tuple(dist.get_process_group_ranks(_group_of(args)))
            self.groups.add(ranks)
            tensors = [each for each in tree_leaves(args[whole]) if isinstance(each, Tensor)]
            apart = ranks[1] - ranks[0] if len(ranks) > 1 else 0
            call = Call(kind, len(ranks), apart, sum(each.numel() for each in tensors), tensors[0].dtype)
            self.calls.append(call)
            self.meddle(call, tensors)
        return result


def _group_of(args: Any) -> Any:
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    raise AssertionError("a collective without a group")


def _mean_over_ranks(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and wants no text
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


@contextmanager
def as_rank(rank: int, ranks: int, spoken: Spoken) -> Iterator[None]:
    """Within it this process is one of many; rank 0 first."""
    names = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % PER_NODE,
        "LOCAL_WORLD_SIZE": PER_NODE,
        "NODE_RANK": rank // PER_NODE,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    spoken.heard = 0
    say = dist.broadcast_object_list

    def broadcast(objects: list[Any], src: int = 0, *args: Any, **kwargs: Any) -> None:
        assert src == 0
        if rank == 0:
            say(objects, src, *args, **kwargs)
            spoken.words.append(copy.deepcopy(objects))
            return
        objects[:] = copy.deepcopy(spoken.words[spoken.heard])
        spoken.heard += 1
        say(objects, rank, *args, **kwargs)

    replicate = composer_internals.replicate

    def replicated(module: nn.Module, find_unused_parameters: bool) -> nn.Module:
        """Replaces DDP's own hook, which reads values that a fake group lacks, with the same effect."""
        model = replicate(module, find_unused_parameters)
        model.register_comm_hook(None, _mean_over_ranks)
        return model

    with (
        patch.dict(os.environ, {name: str(value) for name, value in names.items()}),
        patch.object(dist, "broadcast_object_list", broadcast),
        patch.object(DeviceCPU, "dist_backend", "fake"),
        patch.object(composer_internals, "replicate", replicated),
        patch.object(session, "joined", lambda *_: nullcontext()),  # there are no other ranks to watch
    ):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds meshes of this rank, equal to the next rank's
