"""What GPUs send each other in a step under DDP, FSDP2 and HSDP, and how much of it the computation hides.

With P parameters, w bytes a gathered weight (2 in bf16), g GPUs in each of k nodes, N = g k ranks, one step moves:

    ddp     an all-reduce of 4 P over N ranks, once a step, while the last microbatch goes backward
    fsdp2   each microbatch: all-gather of w P forward and w P_layers backward, reduce-scatter of 4 P, over N ranks
    hsdp    the same over the s ranks that share one copy of the weights (those of a node, unless the configuration
            says otherwise), and an all-reduce of 4 P / s over the N / s copies, each microbatch

A ring over n ranks moves (n - 1) / n of the bytes through each link for an all-gather or a reduce-scatter, twice that
for an all-reduce. Over k nodes, the cards that a group has in one node share the (k - 1) / k of the bytes that cross
its border. The slower of the two sets the rate. Each call also waits for its hops: a ring for all-gather and
reduce-scatter, which grows with N; a tree over nodes for all-reduce, which grows with log2 k.

Links are taken to reach LINK_SHARE of their datasheet rate. A test counts the calls and bytes of real ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from modernbert_train.plan.gpus import Gpu
from modernbert_train.plan.memory import Strategy
from modernbert_train.plan.parameters import Parameters

LINK_SHARE = 0.8  # of the datasheet's rate that a large message reaches
NODE_HOP_SECONDS = 2e-6  # from one GPU to the next in its node
NETWORK_HOP_SECONDS = 8e-6  # from node to node
DDP_BUCKET_BYTES = 25 * (1 << 20)  # torch's default
BACKWARD_SHARE = 2 / 3  # of the time of a microbatch

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Transfer:
    """One kind of collective, as often as it is called in one go.

    Attributes:
        kind: of the collective.
        inside: ranks of one group that share a node.
        nodes: over which one group spreads; all groups are at it at once.
        moment: of the microbatch in which it happens.
        payload: bytes of the whole tensors, over all calls.
        calls: how many.
        every_microbatch: or only with the last one of a step.
    """

    kind: Kind
    inside: int
    nodes: int
    moment: Literal["forward", "backward"]
    payload: int
    calls: int
    every_microbatch: bool


def transfers(
    strategy: Strategy,
    parameters: Parameters,
    *,
    num_layers: int,
    bf16: bool,
    ranks: int,
    shards: int,
    per_node: int,
) -> list[Transfer]:
    """The collectives of one step.

    Args:
        strategy: see the head of this file.
        parameters: of the model.
        num_layers: each is a unit of its own; embeddings and head together are one more.
        bf16: weights are gathered in bf16; gradients are always reduced in fp32.
        ranks: of the run.
        shards: ranks that share one copy of the weights.
        per_node: ranks in a node.
    """
    total = parameters.total
    everyone = (min(ranks, per_node), -(-ranks // per_node))
    if strategy == "ddp":
        calls = max(1, math.ceil(4 * total / DDP_BUCKET_BYTES))
        return [Transfer("all_reduce", *everyone, "backward", 4 * total, calls, False)]
    group = (min(shards, per_node), -(-shards // per_node))
    c, units = (2 if bf16 else 4), num_layers + 1
    found = [
        Transfer("all_gather", *group, "forward", c * total, units, True),
        Transfer("all_gather", *group, "backward", c * parameters.layers, num_layers, True),
        Transfer("reduce_scatter", *group, "backward", 4 * total, units, True),
    ]
    if strategy == "hsdp":
        copies = -(-ranks // shards)
        beside = max(1, min(ranks, per_node) // shards)  # copies in one node
        found.append(Transfer("all_reduce", beside, -(-copies // beside), "backward", 4 * total // shards, units, True))
    return found


def transfer_seconds(transfer: Transfer, gpu: Gpu) -> float:
    """Time of one transfer when nothing else uses the links; see the head of this file."""
    inside, nodes = transfer.inside, transfer.nodes
    ranks = inside * nodes
    if ranks == 1:
        return 0.0
    crossing = (nodes - 1) / nodes * transfer.payload / (inside * LINK_SHARE * gpu.network_link)
    within = (ranks - 1) / ranks * transfer.payload / (LINK_SHARE * gpu.node_link) if inside > 1 else 0.0
    if transfer.kind == "all_reduce":
        hops = 2 * ((inside - 1) * NODE_HOP_SECONDS + math.log2(nodes) * NETWORK_HOP_SECONDS)
        return 2 * max(within, crossing) + transfer.calls * hops
    hops = (ranks - nodes) * NODE_HOP_SECONDS + (nodes * NETWORK_HOP_SECONDS if nodes > 1 else 0.0)
    return max(within, crossing) + transfer.calls * hops


@dataclass(frozen=True)
class Exchange:
    """Communication of one step, of one GPU.

    Attributes:
        payload: bytes of all whole tensors that are gathered or reduced.
        seconds: of all collectives, one after the other.
        exposed: seconds of them that the computation cannot hide.
    """

    payload: int
    seconds: float
    exposed: float


def exchange(parts: list[Transfer], gpu: Gpu, microbatch_seconds: float, microbatches: int) -> Exchange:
    """Communication of a step that computes `microbatches` times `microbatch_seconds`.

    A third of a microbatch is its forward pass, and transfers overlap with the pass they belong to. What cannot
    overlap is the first gather and the last reduction, one call each, and what a pass is too short for.

    Args:
        parts: from `transfers`.
        gpu: its links.
        microbatch_seconds: computation of one microbatch, forward and backward.
        microbatches: of one step on one rank.
    """
    payload, total, exposed = 0, 0.0, 0.0
    room = {
        "forward": (1 - BACKWARD_SHARE) * microbatch_seconds,
        "backward": BACKWARD_SHARE * microbatch_seconds,
    }
    for moment, seconds in room.items():
        for every in (True, False):
            here = [part for part in parts if part.moment == moment and part.every_microbatch == every]
            if not here:
                continue
            times = microbatches if every else 1
            took = sum(transfer_seconds(part, gpu) for part in here)
            lone = max(transfer_seconds(part, gpu) / part.calls for part in here)
            payload += times * sum(part.payload for part in here)
            total += times * took
            exposed += times * max(lone, took - seconds)
    return Exchange(payload, total, exposed)
