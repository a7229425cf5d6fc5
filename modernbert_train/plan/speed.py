"""Seconds of a microbatch and of a step, by a roofline with stated shares.

It adds three times, each at a share of a datasheet rate: matrix products, attention, and the traffic of everything
elementwise, which in every encoder is taken to be that of ModernBERT's layers. The shares are chosen so that the four
averages that ModernBERT's authors published for H100 come out within +21 %, +10 %, -2 % and -6 % (base and large at
1,024 and 8,192 tokens); a test keeps that true. Other runs are further off, small widths most: see ROOFLINE_ERRORS in
gpus.py. Small microbatches are bound by the time to launch kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modernbert_train.config.schema import ComputeConfig, ModelConfig, ObjectiveConfig, OptimConfig
from modernbert_train.plan.census import census
from modernbert_train.plan.communication import Exchange, exchange, transfers
from modernbert_train.plan.flops import Flops, optimizer_flops
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.memory import Strategy, matrix_numbers, sharing_ranks, summed_numbers
from modernbert_train.plan.parameters import count_parameters

MATRIX_SHARE = 0.55  # of the peak, in matrix products of these widths
ATTENTION_SHARE = 0.27  # of the peak, FlashAttention-2 forward and backward with heads of 64
MEMORY_SHARE = 0.75  # of the memory's rate
LOCAL_TILES = 2.5  # keys that a kernel computes for each key inside a window: tiles of 128 overhang it
LAUNCH_SECONDS = 5e-6  # of one kernel
# read and written for each parameter: weight, gradient, two moments; tensor by tensor, and in two kernels
OPTIMIZER_BYTES, FUSED_OPTIMIZER_BYTES = 140, 40
FUSED_ADAMW_BYTES = 28  # torch's one kernel reads all four and writes all but the gradient
PLANNED_TOKENS_PER_SECOND = 950e6  # by one core, on each rank, of the whole batch; benchmarks/packing.py


@dataclass(frozen=True)
class Traffic:
    """Elementwise memory traffic of training, in bytes, and kernels, forward and backward together.

    Attributes:
        width, hidden: bytes for each token and layer, times the model width and the hidden width.
        logit: bytes for each logit.
        kernels: launched for each layer.
    """

    width: float
    hidden: float
    logit: float
    kernels: int


COMPILED = Traffic(width=100, hidden=20, logit=10, kernels=40)  # 100 KB a token and layer of base, 155 KB of large
BF16_RESIDUAL_WIDTH = 22  # of it, that a residual in bf16 saves: 80 -> 63 KB by tests/cuda_build/layer_bytes.py
EAGER = Traffic(width=420, hidden=30, logit=42, kernels=110)  # counted operation by operation, residuals in fp32


@dataclass(frozen=True)
class Work:
    """What one rank computes in a phase.

    Attributes:
        model: the encoder.
        objective: what is trained.
        compute: how it is computed.
        optim: the optimizer.
        row_tokens: of the phase.
        flops: of a token that is not padding.
        fill: share of a line that is not padding.
    """

    model: ModelConfig
    objective: ObjectiveConfig
    compute: ComputeConfig
    optim: OptimConfig
    row_tokens: int
    flops: Flops
    fill: float

    @property
    def encoders(self) -> list[ModelConfig]:
        generator = self.objective.generator_of(self.model)
        return [self.model] if generator is None else [self.model, generator]

    @property
    def num_layers(self) -> int:
        return sum(encoder.num_layers for encoder in self.encoders)


@dataclass(frozen=True)
class StepTime:
    """One optimizer step.

    Attributes:
        compute: seconds of computation on each rank, the optimizer included.
        sent: communication.
        planning: seconds of the host, which plans the next batch while the device is busy.
        tokens: global tokens that are not padding.
        ranks: over which they are spread.
    """

    compute: float
    sent: Exchange
    planning: float
    tokens: float
    ranks: int

    @property
    def seconds(self) -> float:
        return max(self.compute + self.sent.exposed, self.planning)

    @property
    def efficiency(self) -> float:
        """Share of the step that computes."""
        return self.compute / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of each GPU."""
        return self.tokens / self.seconds / self.ranks


def microbatch_seconds(gpu_name: str, work: Work, tokens: int) -> float:
    """Computation of one microbatch, forward and backward, by FLOPs, bytes and launches.

    Args:
        gpu_name: key of GPUS.
        work: what is computed.
        tokens: of the microbatch, padding included.
    """
    gpu, flops = GPUS[gpu_name], work.flops
    traffic = COMPILED if work.compute.compile else EAGER
    if work.compute.compile and work.compute.residual_precision == "bf16":
        traffic = replace(traffic, width=traffic.width - BF16_RESIDUAL_WIDTH)
    passes = 4 if work.compute.activation_checkpointing else 3  # the layers' forward pass is computed twice
    matrices = passes * flops.layers + 3 * flops.head
    attention = passes * (flops.global_attention + LOCAL_TILES * flops.local_attention) * work.fill
    widths = ((each.num_layers, each.hidden_size, each.intermediate_size) for each in work.encoders)
    layer_bytes = sum(layers * (traffic.width * width + traffic.hidden * hidden) for layers, width, hidden in widths)
    moved = passes / 3 * layer_bytes * (1 + work.objective.query_share)
    moved += traffic.logit * work.model.vocab_size * work.objective.predicted_share
    seconds = matrices / (MATRIX_SHARE * gpu.peak_flops) + attention / (ATTENTION_SHARE * gpu.peak_flops)
    seconds += moved / (MEMORY_SHARE * gpu.memory_rate)
    return max(tokens * seconds, LAUNCH_SECONDS * traffic.kernels * work.num_layers)


def optimizer_bytes(optim: OptimConfig) -> int:
    """Moved for each parameter by an update."""
    if not optim.fused:
        return OPTIMIZER_BYTES
    return FUSED_OPTIMIZER_BYTES if optim.bounds_update else FUSED_ADAMW_BYTES


def step_time(
    gpu_name: str,
    work: Work,
    *,
    strategy: Strategy,
    ranks: int,
    rows: int,
    microbatch_rows: int,
    shard_ranks: int | None = None,
) -> StepTime:
    """Time of one optimizer step.

    Args:
        gpu_name: key of GPUS.
        work: what is computed.
        strategy: how ranks share the model.
        ranks: GPUs.
        rows: of the global batch; the rank with most sets the pace.
        microbatch_rows: of one forward pass, at most; the last microbatch may be smaller.
        shard_ranks: of hsdp, ranks that share one copy of the weights; None: those of a node.
    """
    gpu, model = GPUS[gpu_name], census(work.model, work.objective)
    parameters = count_parameters(work.model, work.objective)
    own_rows = -(-rows // ranks)
    whole, rest = divmod(own_rows, microbatch_rows)
    sizes = [microbatch_rows] * whole + [rest] * (rest > 0)
    timed = {size: microbatch_seconds(gpu_name, work, size * work.row_tokens) for size in set(sizes)}
    compute = sum(timed[size] for size in sizes)
    shards = sharing_ranks(strategy, ranks, shard_ranks, gpu)
    compute += optimizer_bytes(work.optim) * parameters.total / shards / (MEMORY_SHARE * gpu.memory_rate)
    # Muon's matrices are shared out among those that share the weights
    compute += optimizer_flops(model, work.optim) / shards / (MATRIX_SHARE * gpu.peak_flops)
    sent = Exchange(0, 0.0, 0.0)
    if ranks > 1:
        parts = transfers(
            strategy,
            count_parameters(work.model, work.objective, shards=shards),
            num_layers=parameters.units,
            exchanged=matrix_numbers(parameters, work.optim),
            summed=summed_numbers(parameters, work.optim),
            ranks=ranks,
            shards=shards,
            per_node=gpu.per_node,
        )
        sent = exchange(parts, gpu, [timed[size] for size in sizes])
    tokens = rows * work.row_tokens * work.fill
    return StepTime(compute, sent, tokens / PLANNED_TOKENS_PER_SECOND, tokens, ranks)
