"""Predict the seconds of a microbatch and of a step, as a sum over kernels by their shapes.

Every product of the step is counted, forward and both gradients, as the slower of two times: its FLOPs, at a share of
the peak that grows with the inner dimension, and its bytes. Attention counts the tiles that its kernels compute, see
attended_keys.py; elementwise work, loss, casts of weights and launches are counted operation by operation
(tests/cuda_build). Shares were measured on single kernels on H100, by the sources below; other GPUs are assumed to
reach the same. On an H200 base took 1.02 times the sum and large 1.05 times (benchmarks/RESULTS.md).

Programs are slower than the sum of their kernels. `PUBLISHED` fits eight runs of ModernBERT's program, from 17 M to 1 B
parameters, within 13 %, and within 18 % when the run itself is left out: `python -m benchmarks.published`; a test
checks this. One of its two numbers is a time for each token, the same for all models, so layers do not cause it; most
likely the host does, which there packs and masks in the process that feeds the GPU. Here other processes do that, and
the time may be absent. So every prediction is a range, from `FASTEST` to `SLOWEST`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from modernbert_train.config.schema import ComputeConfig, MaskedLmConfig, ModelConfig, ObjectiveConfig, OptimConfig
from modernbert_train.plan.attended_keys import Tiles
from modernbert_train.plan.census import Matrix, census
from modernbert_train.plan.communication import Exchange, Transfer, exchange, transfers
from modernbert_train.plan.flops import optimizer_flops
from modernbert_train.plan.gpus import GPUS, HOPPER, Gpu
from modernbert_train.plan.memory import Strategy, matrix_numbers, sharing_ranks, summed_numbers
from modernbert_train.plan.parameters import count_parameters
from modernbert_train.plan.teacher_cost import teacher_of

# share of the peak of a product with inner dimension K: TOP K / (K + HALF_K). Large products reach 790 of 989 TFLOP/s
# on H200; at K = 768, twelve steps of a kernel's inner loop, 55 to 60 % are expected
PRODUCT_TOP, PRODUCT_HALF = 0.80, 300
MEMORY_SHARE = 0.75  # share of the memory's rate that kernels reach
BLOCK_SECONDS = 1e-6 / 132  # time of a block without work: some 1 us on one of 132 multiprocessors
# bytes read and written for each parameter: weight, gradient, two moments; tensor by tensor, and in two kernels
OPTIMIZER_BYTES, FUSED_OPTIMIZER_BYTES = 140, 40
FUSED_ADAMW_BYTES = 28  # torch's single kernel reads all four and writes all but the gradient
WEIGHT_BYTES = 24  # per parameter and microbatch: about 12 for casts (bf16 needs one a step), 12 to accumulate
PLANNED_TOKENS_PER_SECOND = 950e6  # by one core on each rank, of the global batch; benchmarks/packing.py


@dataclass(frozen=True)
class Attention:
    """Share of the peak of a kernel, forward and backward, heads of 64: top n / (n + half) for a sequence of n tokens.

    So each token costs as if it saw `half` more keys. Fitted to the curves of arXiv 2407.08608, full attention at 512
    to 16,384 tokens on H100, within 2 % (FlashAttention-3: 4 %).
    """

    top: float
    half: int


FLASH2, FLASH3 = Attention(0.262, 195), Attention(0.44, 378)


@dataclass(frozen=True)
class Traffic:
    """Elementwise memory traffic of training, in bytes, and kernel launches, forward and backward together.

    Attributes:
        width, hidden: bytes for each token and layer, times the model width and the hidden width.
        logit: bytes for each logit.
        kernels: launches for each layer, products and attention included.
    """

    width: float
    hidden: float
    logit: float
    kernels: int


# from tests/cuda_build/recorded/microbatch.json; a test compares them
COMPILED = Traffic(width=80, hidden=16, logit=8, kernels=40)  # 80 KB a token and layer of base, 124 KB of large
BF16_RESIDUAL_WIDTH = 22  # part of `width` saved by a residual in bf16: 80 -> 63 KB by tests/cuda_build/layer_bytes.py
EAGER = Traffic(width=364, hidden=31, logit=42, kernels=72)


@dataclass(frozen=True)
class Pace:
    """How much slower a program is than the sum of its kernels.

    Attributes:
        device: factor on that sum.
        launch: seconds of the host for one kernel; a microbatch takes at least all its launches.
        token: seconds per token of a rank that its GPU waits for the host.
    """

    device: float
    launch: float
    token: float


# The host was timed on the null device, on one slow core: base takes 19 ms for 883 kernels, under DDP 29 to 34 ms; half
# of that on a good core.
FASTEST = Pace(1.0, 11e-6, 0.0)  # each kernel as fast as when measured alone, and no waiting
PUBLISHED = Pace(1.11, 22e-6, 0.72e-6)  # fitted to ModernBERT's program
EXPECTED = Pace(PUBLISHED.device, PUBLISHED.launch, 0.0)  # used for advice and scaling
ERROR = 1.18  # the largest error of a run that was left out of the fit
SLOWEST = Pace(ERROR * PUBLISHED.device, 38e-6, ERROR * PUBLISHED.token)


@dataclass(frozen=True)
class Work:
    """Computation of one rank in a phase.

    Attributes:
        model: the encoder.
        objective: the phase's objective.
        compute: how it is computed.
        optim: the optimizer.
        row_tokens: the phase's row length.
        tiles: keys that attention's kernels compute.
        sequence_tokens: mean length of a sequence, with special tokens.
        fill: share of a row that is not padding.
    """

    model: ModelConfig
    objective: ObjectiveConfig
    compute: ComputeConfig
    optim: OptimConfig
    row_tokens: int
    tiles: Tiles
    sequence_tokens: float
    fill: float

    @property
    def encoders(self) -> list[ModelConfig]:
        generator = self.objective.generator_of(self.model)
        return [self.model] if generator is None else [self.model, generator]

    @property
    def traffic(self) -> Traffic:
        if not self.compute.compile:
            return EAGER
        saved = BF16_RESIDUAL_WIDTH if self.compute.residual_precision == "bf16" else 0
        return replace(COMPILED, width=COMPILED.width - saved)

    @property
    def kernels(self) -> int:
        """Number of launches for a microbatch."""
        return self.traffic.kernels * sum(encoder.num_layers for encoder in self.encoders)

    def products(self, tokens: int) -> list[tuple[Matrix, float]]:
        """Return each matrix with the number of positions that it is multiplied with, for this many tokens of text."""
        uses = self.objective.uses_of_heads(self.sequence_tokens)
        encoded = self.objective.encoded_tokens(self.sequence_tokens)
        matrices = census(self.model, self.objective).matrices
        used = (each for each in matrices if each.uses and not each.once)
        positions_of = [(each, tokens * (encoded if each.head is None else uses[each.head])) for each in used]
        return [(matrix, positions) for matrix, positions in positions_of if positions]


@dataclass(frozen=True)
class StepTime:
    """Time of one optimizer step.

    Attributes:
        compute: seconds of computation on each rank, the optimizer included.
        sent: communication.
        planning: seconds of the host, which plans the next batch while the device is busy.
        tokens: global tokens that are not padding.
        ranks: number of ranks that share them.
        between: fastest and slowest seconds of the step; all other values are expected ones.
    """

    compute: float
    sent: Exchange
    planning: float
    tokens: float
    ranks: int
    between: tuple[float, float]

    @property
    def seconds(self) -> float:
        return max(self.compute + self.sent.exposed, self.planning)

    @property
    def times(self) -> NDArray[np.float64]:
        """Seconds [3]: fastest, expected, slowest."""
        return np.array([self.between[0], self.seconds, self.between[1]])

    @property
    def efficiency(self) -> float:
        """Share of the step spent in computation."""
        return self.compute / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of each GPU."""
        return self.tokens / self.seconds / self.ranks


def product_share(inner: float) -> float:
    """Return the share of the peak that a product of this inner dimension reaches."""
    return PRODUCT_TOP * inner / (inner + PRODUCT_HALF)


def product_seconds(gpu: Gpu, positions: float, rows: int, columns: int, forwards: int = 1) -> float:
    """Return the seconds of x [positions, columns] times a weight [rows, columns], and of both gradients, in bf16.

    Args:
        gpu: kind of GPU.
        positions, rows, columns: see above.
        forwards: number of times the forward pass is computed.
    """

    def once(m: float, n: float, inner: float) -> float:
        computing = 2 * m * n * inner / (product_share(inner) * gpu.peak_flops)
        return max(computing, 2 * (m * inner + inner * n + m * n) / (MEMORY_SHARE * gpu.memory_rate))

    return forwards * once(positions, rows, columns) + once(positions, columns, rows) + once(rows, columns, positions)


def attention_of(gpu_name: str, compute: ComputeConfig, window: int | None) -> Attention:
    """Return the kernel's curve: FlashAttention-3 if `flash` is configured on Hopper, otherwise FlashAttention-2."""
    kernel = (compute.global_attention or compute.attention) if window is None else compute.attention
    return FLASH3 if kernel == "flash" and gpu_name in HOPPER else FLASH2


def parts(gpu_name: str, work: Work, tokens: int) -> dict[str, float]:
    """Return the device's seconds for one microbatch, forward and backward, by part, as a sum over separate kernels.

    Args:
        gpu_name: key of GPUS.
        work: the computation.
        tokens: tokens of the microbatch, padding included.
    """
    gpu, compute, tiles, counted = GPUS[gpu_name], work.compute, work.tiles, census(work.model, work.objective)
    passes = work.objective.forward_passes
    # additional forward passes of the layers
    again = passes - 1 + (1 if compute.activation_checkpointing else 0)
    moved = MEMORY_SHARE * gpu.memory_rate
    products = {False: 0.0, True: 0.0}  # of layers, and of heads
    for matrix, positions in work.products(tokens):
        of_head = matrix.head is not None
        forwards = passes if of_head else 1 + again
        took = product_seconds(gpu, positions, matrix.parts * matrix.rows, matrix.columns, forwards)
        products[of_head] += matrix.weights * matrix.uses * matrix.passes * took
    attention = {False: 0.0, True: 0.0}  # global and local
    for flops, window in zip(counted.key_flops, counted.windows, strict=True):
        curve, keys = attention_of(gpu_name, compute, window), tiles.whole if window is None else tiles.local
        one_pass = tokens * work.fill * flops * (keys + curve.half) / (curve.top * gpu.peak_flops)
        attention[window is not None] += (3 + again) * one_pass
    grids = sum((2 + again) * each.num_layers * each.num_heads for each in work.encoders)
    layer_bytes = sum(
        each.num_layers * (work.traffic.width * each.hidden_size + work.traffic.hidden * each.intermediate_size)
        for each in work.encoders
    )
    logits = tokens * work.objective.predicted_share * work.model.vocab_size
    seconds: dict[str, float] = {}
    if (teacher := teacher_of(work.objective)) is not None:  # forward only: a third of training it
        alone = replace(work, model=teacher, objective=MaskedLmConfig(mask_rate=work.objective.predicted_share))
        seconds["teacher"] = sum(parts(gpu_name, alone, tokens).values()) / 3
    return seconds | {
        "products of layers": products[False],
        "products of heads": products[True],
        "attention, global": attention[False],
        "attention, local": attention[True],
        "attention, empty blocks": BLOCK_SECONDS * grids * tokens * tiles.empty(work.sequence_tokens),
        "elementwise, layers": (3 + again) / 3 * tokens * (1 + work.objective.query_share) * layer_bytes / moved,
        "loss": work.traffic.logit * logits / moved,
        "casts and sums of weights": WEIGHT_BYTES * count_parameters(work.model, work.objective).total / moved,
    }


def microbatch_seconds(gpu_name: str, work: Work, tokens: int, pace: Pace = EXPECTED) -> float:
    """Return the seconds of one microbatch, forward and backward.

    Args:
        gpu_name: key of GPUS.
        work: the computation.
        tokens: tokens of the microbatch, padding included.
        pace: the program's.
    """
    device = pace.device * sum(parts(gpu_name, work, tokens).values())
    launched = (2 + work.objective.forward_passes) / 3 * work.kernels
    return max(device, pace.launch * launched) + pace.token * tokens


def optimizer_bytes(optim: OptimConfig) -> int:
    """Return the bytes that an update moves for each parameter."""
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
    """Predict the time of one optimizer step.

    Args:
        gpu_name: key of GPUS.
        work: the computation.
        strategy: how ranks share the model.
        ranks: GPUs.
        rows: rows of the global batch; the rank with most sets the pace.
        microbatch_rows: rows of one forward pass, at most; the last microbatch may be smaller.
        shard_ranks: for hsdp, ranks that share one copy of the weights; None: one node's.
    """
    gpu, model = GPUS[gpu_name], census(work.model, work.objective)
    parameters = count_parameters(work.model, work.objective)
    own_rows = -(-rows // ranks)
    num_full, remainder = divmod(own_rows, microbatch_rows)
    sizes = [microbatch_rows] * num_full + [remainder] * (remainder > 0)
    shards = sharing_ranks(strategy, ranks, shard_ranks, gpu)
    update = optimizer_bytes(work.optim) * parameters.total / shards / (MEMORY_SHARE * gpu.memory_rate)
    # Muon's matrices are divided among the ranks that share the weights
    share = product_share(work.model.hidden_size)
    update += optimizer_flops(model, work.optim) / shards / (share * gpu.peak_flops)
    sending: list[Transfer] = []
    if ranks > 1:
        sending = transfers(
            strategy,
            count_parameters(work.model, work.objective, shards=shards),
            num_layers=parameters.units,
            exchanged=matrix_numbers(parameters, work.optim),
            summed=summed_numbers(parameters, work.optim),
            ranks=ranks,
            shards=shards,
            per_node=gpu.per_node,
            passes=work.objective.forward_passes,
        )
    tokens = rows * work.row_tokens * work.fill

    def at(pace: Pace, between: tuple[float, float] = (0.0, 0.0)) -> StepTime:
        timed = {size: microbatch_seconds(gpu_name, work, size * work.row_tokens, pace) for size in set(sizes)}
        computed = [timed[size] for size in sizes]
        sent = exchange(sending, gpu, computed) if sending else Exchange(0, 0.0, 0.0)
        planning = tokens / PLANNED_TOKENS_PER_SECOND
        return StepTime(sum(computed) + pace.device * update, sent, planning, tokens, ranks, between)

    return at(EXPECTED, (at(FASTEST).seconds, at(SLOWEST).seconds))
