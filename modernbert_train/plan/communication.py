"""Bytes that GPUs exchange in a step under DDP, FSDP2 and HSDP, and how much of that the computation hides.

With P parameters, E of them in the embedding and P_root outside the layers or shared by several layers, g GPUs in each
of k nodes, N = g k ranks, everything in fp32, in bf16 runs too (train/adapters.py says why), one step moves:

    ddp     an all-reduce of 4 P over N ranks, once a step, while the last microbatch goes backward
    fsdp2   each microbatch: all-gather of 4 P forward and 4 P_layers backward, reduce-scatter of 4 P, over N ranks;
            4 P_layers more for each further forward pass
    hsdp    the same over the s ranks that share one copy of the weights (one node's, unless the configuration says
            otherwise), and an all-reduce of 4 P / s over the N / s copies, with the last microbatch only
    muon    on shards, once: two all-to-alls of 4 P_matrices over the ranks that share them; never hidden
    shards  once: an all-reduce of 24 bytes a weight over the ranks that share them: StableAdamW's sums, Muon's too
    each    COLLECTIVES all-reduces of a few numbers over N ranks (predicted tokens, the guard); never hidden

All shards of a weight have equally many rows, so P includes the padding of the last shard: over 1,024 ranks, base grows
by a quarter.

The first and the last transfers have no computation to hide behind: forward the gathers of the root (parameters outside
the layers) and of the first layer; backward the reductions of the last layer and of the root. The embedding is most of
the root. It is tied to the decoder, so its gradient is ready last, under DDP too, where it fills the last bucket.

A ring over n ranks moves (n - 1) / n of the bytes through each link for an all-gather or a reduce-scatter, twice that
for an all-reduce; an all-to-all moves 1 / n of it. Over k nodes, the network cards of a group's GPUs in one node share
the (k - 1) / k of the bytes that leave the node. The slower of the two sets the rate. Each call also waits for its
hops: a ring for all-gather, reduce-scatter and all-to-all, which grows with N; a tree over nodes for all-reduce, which
grows with log2 k.

Links are assumed to reach LINK_SHARE of their datasheet rate. A test counts calls and bytes of real training steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modernbert_train.plan.gpus import Gpu
from modernbert_train.plan.memory import Strategy
from modernbert_train.plan.parameters import Parameters

LINK_SHARE = 0.8  # share of the datasheet's rate that a large message reaches
NODE_HOP_SECONDS = 2e-6  # from one GPU to the next in its node
NETWORK_HOP_SECONDS = 8e-6  # from node to node
DDP_BUCKET_BYTES = 25 * (1 << 20)  # torch's default
BACKWARD_SHARE = 2 / 3  # share of a microbatch's time
COLLECTIVES = 2  # small all-reduces of a step
COLLECTIVE_BYTES = 28  # on average, with one loss term

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True)
class Transfer:
    """Calls of one kind of collective that run back to back.

    Attributes:
        kind: the collective.
        inside: ranks of one group that share a node.
        nodes: nodes that one group spans; all groups communicate at the same time.
        moment: part of the microbatch in which it runs.
        payload: bytes of the whole tensors, over all calls.
        calls: number of calls.
        every_microbatch: False if it runs with the last microbatch of a step only.
        hidden: True if computation continues meanwhile, except during one of the calls.
    """

    kind: Kind
    inside: int
    nodes: int
    moment: Literal["forward", "backward"]
    payload: int
    calls: int
    every_microbatch: bool
    hidden: bool


def transfers(
    strategy: Strategy,
    parameters: Parameters,
    *,
    num_layers: int,
    ranks: int,
    shards: int,
    per_node: int,
    exchanged: int = 0,
    summed: int = 0,
    passes: int = 1,
) -> list[Transfer]:
    """Return the collectives of one step.

    Args:
        strategy: see the module's docstring.
        parameters: the model's, counted for these shards.
        num_layers: layers that are separate FSDP units, see `Parameters.units`; all other parameters form one more.
        ranks: ranks of the run.
        shards: ranks that share one copy of the weights.
        per_node: ranks in a node.
        exchanged: numbers that the optimizer sends to their owners and back, see `matrix_numbers`.
        summed: numbers that the optimizer sums over shards, see `summed_numbers`.
        passes: see `ObjectiveConfig.forward_passes`.
    """
    everyone = (min(ranks, per_node), -(-ranks // per_node))
    numbers = COLLECTIVES * COLLECTIVE_BYTES + (8 * ranks if strategy == "ddp" else 0)  # ddp adds each rank's time
    collectives = [Transfer("all_reduce", *everyone, "backward", numbers, COLLECTIVES, False, False)]
    if strategy == "ddp":
        buckets = max(0, 4 * (parameters.trained - parameters.embedding)) // DDP_BUCKET_BYTES
        last = 4 * parameters.trained - buckets * DDP_BUCKET_BYTES
        if buckets:
            collectives.append(
                Transfer("all_reduce", *everyone, "backward", buckets * DDP_BUCKET_BYTES, buckets, False, True)
            )
        return [*collectives, Transfer("all_reduce", *everyone, "backward", last, 1, False, False)]
    root, layers = 4 * parameters.root, 4 * (parameters.layers - parameters.shared)
    group = (min(shards, per_node), -(-shards // per_node))
    collectives.append(Transfer("all_gather", *group, "forward", root, 1, True, False))
    if num_layers:
        collectives += [
            Transfer("all_gather", *group, "forward", passes * layers, passes * num_layers, True, True),
            Transfer("all_gather", *group, "backward", layers, num_layers, True, True),
            Transfer("reduce_scatter", *group, "backward", layers, num_layers, True, True),
        ]
    collectives.append(Transfer("reduce_scatter", *group, "backward", root, 1, True, False))
    if exchanged:
        collectives.append(Transfer("all_to_all", *group, "backward", 2 * 4 * exchanged, 2, False, False))
    if summed:
        collectives.append(Transfer("all_reduce", *group, "backward", 8 * summed, 1, False, False))
    if strategy == "hsdp":
        copies = -(-ranks // shards)
        copies_per_node = max(1, min(ranks, per_node) // shards)
        across = (copies_per_node, -(-copies // copies_per_node))
        if num_layers:
            collectives.append(Transfer("all_reduce", *across, "backward", layers // shards, num_layers, False, True))
        collectives.append(Transfer("all_reduce", *across, "backward", root // shards, 1, False, False))
    return collectives


def transfer_seconds(transfer: Transfer, gpu: Gpu) -> float:
    """Return the seconds of one transfer on otherwise idle links; see the module's docstring."""
    inside, nodes = transfer.inside, transfer.nodes
    ranks = inside * nodes
    if ranks == 1:
        return 0.0
    crossing = (nodes - 1) / nodes * transfer.payload / (inside * LINK_SHARE * gpu.network_link)
    within = (ranks - 1) / ranks * transfer.payload / (LINK_SHARE * gpu.node_link) if inside > 1 else 0.0
    if transfer.kind == "all_reduce":
        hops = 2 * ((inside - 1) * NODE_HOP_SECONDS + math.log2(nodes) * NETWORK_HOP_SECONDS)
        return 2 * max(within, crossing) + transfer.calls * hops
    if transfer.kind == "all_to_all":  # every rank sends only its share
        within, crossing = within / ranks, crossing / nodes
    hops = (ranks - nodes) * NODE_HOP_SECONDS + (nodes * NETWORK_HOP_SECONDS if nodes > 1 else 0.0)
    return max(within, crossing) + transfer.calls * hops


@dataclass(frozen=True)
class Exchange:
    """Communication of one step on one GPU.

    Attributes:
        payload: bytes of all whole tensors that are gathered or reduced.
        seconds: time of all collectives, one after the other.
        exposed: part of these seconds that the computation cannot hide.
    """

    payload: int
    seconds: float
    exposed: float


def exchange(collectives: Sequence[Transfer], gpu: Gpu, microbatch_seconds: Sequence[float]) -> Exchange:
    """Estimate the communication of a step.

    A third of a microbatch's time is its forward pass. A transfer that can be hidden overlaps with its pass.

    Args:
        collectives: from `transfers`.
        gpu: its links.
        microbatch_seconds: computation of each microbatch of the step on one rank, forward and backward.
    """
    payload, seconds, exposed = 0, 0.0, 0.0
    for number, computed in enumerate(microbatch_seconds, start=1):
        here = [part for part in collectives if part.every_microbatch or number == len(microbatch_seconds)]
        payload += sum(part.payload for part in here)
        seconds += sum(transfer_seconds(part, gpu) for part in here)
        exposed += sum(
            _exposed([part for part in here if part.moment == moment], gpu, share * computed)
            for moment, share in (("forward", 1 - BACKWARD_SHARE), ("backward", BACKWARD_SHARE))
        )
    return Exchange(payload, seconds, exposed)


def _exposed(collectives: Sequence[Transfer], gpu: Gpu, hiding_seconds: float) -> float:
    """Return the seconds of one pass's transfers that its `hiding_seconds` seconds of computation do not hide."""
    bare = sum(transfer_seconds(part, gpu) for part in collectives if not part.hidden)
    hidden = [(transfer_seconds(part, gpu), part.calls) for part in collectives if part.hidden]
    lone = max((took / calls for took, calls in hidden), default=0.0)
    return bare + max(lone, sum(took for took, _ in hidden) - hiding_seconds)
