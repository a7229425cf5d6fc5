"""Predict the memory of one GPU by part, from the tensors that layers save for the backward pass.

The counts follow models/layers.py line by line: every tensor that autograd saves, with its precision under bf16
autocast, where norms stay fp32, and residuals unless compute.residual_precision says otherwise. Tests add up autograd's
saved tensors, eager at ModernBERT-base's size and compiled at a small one, and fail if they differ. The counts are for
fast kernels; sdpa saves more.

If texts are compared, their vectors replace a head; `compared_bytes` follows models/contrastive.py in the same way.

Layers and head are ModernBERT's and ESM-2's: for others only the optimizer's memory is known. The head for pairs is
left out, at most 0.3 % of the layers' memory of ModernBERT-base.

Shape legend: T packed tokens, M predicted positions (padded), D model width, F hidden width, H head width, N heads,
V vocabulary, L layers, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from modernbert_train.config.classify import LoraConfig
from modernbert_train.config.schema import (
    ComputeConfig,
    EsmConfig,
    ModelConfig,
    ModernBertConfig,
    ObjectiveConfig,
    OptimConfig,
)
from modernbert_train.plan.census import census
from modernbert_train.plan.gpus import HasMemory
from modernbert_train.plan.parameters import Parameters, count_parameters

Strategy = Literal["ddp", "fsdp2", "hsdp"]
RESERVED_SHARE = 0.08  # share of a GPU's memory: fragmentation of the allocator, kernels' workspaces
RESERVED_BYTES = 1_500_000_000  # the CUDA context, NCCL, cuBLAS
COSINES = 1 << 25  # computed at a time, as in models/contrastive.py
TEXT_TOKENS = 32  # assumed tokens of a compared text: fewer than queries and passages of retrieval have on average


class Kept(NamedTuple):
    """Architecture-specific sizes of the tensors that layers save for the backward pass.

    Attributes:
        eager, compiled: tensors of width F that the feed-forward saves.
        norm_first: True if a norm precedes the layers; the first layer then has none before attention.
        rotary_tables: number of pairs of rotary tables, in fp32.
    """

    eager: int
    compiled: int
    norm_first: bool
    rotary_tables: int


KEPT: Mapping[type[ModelConfig], Kept] = {
    ModernBertConfig: Kept(4, 3, True, 2),
    EsmConfig: Kept(2, 2, False, 1),  # without a gate
}


def sharing_ranks(strategy: Strategy, ranks: int, shard_ranks: int | None, gpu: HasMemory) -> int:
    """Return the ranks that share a copy of the weights: one (ddp), all (fsdp2), `shard_ranks` or a node (hsdp)."""
    return {"ddp": 1, "fsdp2": ranks, "hsdp": min(ranks, shard_ranks or gpu.per_node)}[strategy]


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak, by part.

    Attributes:
        weights: fp32 master weights.
        gradients: fp32.
        moments: the optimizer's, fp32.
        copies: weights in the precision of the matrix products, and under sharding the weights gathered in fp32.
        buffers: communication.
        layers: tensors that all layers save for the backward pass; with checkpointing their inputs, and one layer.
        head: embedding and norms outside the layers, head, logits and their gradient.
        step: temporaries of the optimizer, allocated after layers and head are freed.
        teacher: see plan/teacher_cost.py.
        compared: see `compared_bytes`; allocated between two passes, when layers hold nothing.
    """

    weights: int
    gradients: int
    moments: int
    copies: int
    buffers: int
    layers: int
    head: int
    step: int
    teacher: int = 0
    compared: int = 0

    @property
    def peak(self) -> int:
        """The largest sum of parts that exist at the same time."""
        lasting = self.weights + self.gradients + self.moments + self.buffers + self.teacher
        return lasting + max(self.copies + max(self.layers + self.head, self.compared), self.step)

    def parts(self) -> dict[str, int]:
        """Return the parts by name; `teacher` and `compared` only if they exist."""
        bytes_of = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in bytes_of.items() if part or name not in ("teacher", "compared")}


def usable_bytes(gpu: HasMemory) -> int:
    """Return the bytes that a run may plan with: all but 8 % and 1.5 GB."""
    return int((1 - RESERVED_SHARE) * gpu.memory_bytes) - RESERVED_BYTES


def layer_bytes(model: ModelConfig, compute: ComputeConfig, bf16: bool) -> int:
    """Return the bytes per token that one layer saves for its backward pass; c is 2 in bf16 and 4 in fp32.

    Attention: the residual 4D and its norm's statistics 8; the norm's output cD; q, k and v as projected 3cD, q and k
    as rotated 2cD; the kernel's output cD and fp32 log-sum-exp 4N; dropout's mask D; in bf16 cosines and sines in fp32
    6H. Feed-forward: the residual 4D and statistics 8; the norm's output cD; Wi's output 2cF, its GELU cF and the
    product with the gate cF. Compiled layers recompute cosines and GELU; they also recompute the first residual from
    the second one of the layer before and that layer's last output, which is saved instead, cD. A residual in bf16 is
    2D if compiled; otherwise its norm saves a copy in fp32. Without a gate: Wi's output cF, GELU cF.
    """
    c, width, hidden = (2 if bf16 else 4), model.hidden_size, model.intermediate_size
    kept = KEPT[type(model)]
    dropout = width if model.has_dropout else 0
    residual = _residual_bytes(model, compute) if compute.compile else 4 * width
    common = residual + 8 + c * 7 * width + 4 * model.num_heads + dropout + 8 + c * width
    if compute.compile:
        return common + c * width + c * kept.compiled * hidden
    return common + residual + c * kept.eager * hidden + (6 * model.head_size if bf16 else 0)


def _residual_bytes(model: ModelConfig, compute: ComputeConfig) -> int:
    return (2 if compute.residual_precision == "bf16" else 4) * model.hidden_size


def layers_bytes(model: ModelConfig, compute: ComputeConfig, bf16: bool, tokens: int) -> int:
    """Return the bytes that autograd saves in all layers; with activation checkpointing only their inputs.

    With `norm_first` the first layer lacks the norm and the residual addition before attention.
    """
    if compute.activation_checkpointing:
        return model.num_layers * _residual_bytes(model, compute) * tokens
    first = 8 + ((2 if bf16 and compute.compile else 4) * model.hidden_size)
    return (model.num_layers * layer_bytes(model, compute, bf16) - first * KEPT[type(model)].norm_first) * tokens


def entry_bytes(model: ModelConfig, bf16: bool) -> int:
    """Return the bytes per token that are saved before the layers.

    The id, the first norm, and in fp32 the rotary tables.
    """
    kept = KEPT[type(model)]
    norm = (4 * model.hidden_size + 8) * kept.norm_first
    return 8 + norm + (0 if bf16 else 6 * kept.rotary_tables * model.head_size)


def adapters_bytes(model: ModelConfig, lora: LoraConfig, bf16: bool, tokens: int) -> int:
    """Return the bytes that autograd saves for adapters beyond `layers_bytes`; fewer with `targets`.

    For each matrix of a layer the input of its adapter's second matrix; with dropout also the input after it and its
    mask. Without dropout an adapter saves the input that its matrix, if it were trained, would save.
    """
    c = 2 if bf16 else 4
    adapted = [each for each in census(model).matrices if each.place == "layer" and each.uses]
    return tokens * sum(
        each.weights * (c * lora.rank + ((c + 1) * each.columns if lora.dropout else 0)) for each in adapted
    )


def outside_bytes(model: ModelConfig, compute: ComputeConfig, bf16: bool, tokens: int, predicted: int) -> int:
    """Return the bytes that autograd saves outside the layers.

    Per token: `entry_bytes`. Per predicted position: its index, input and statistics of the last norm, the inputs of
    the head's product, GELU and norm, statistics, and the gradient of the head's output in fp32. Compiled, the input of
    the head's norm is recomputed. The loss leaves the decoder's gradient in fp32.
    """
    c, width = (2 if bf16 else 4), model.hidden_size
    per_token = entry_bytes(model, bf16)
    norm_input = 0 if compute.compile else 4 * width
    per_prediction = 8 + 4 * width + 8 + 2 * c * width + norm_input + 8 + 4 * width
    return per_token * tokens + per_prediction * predicted + 4 * model.vocab_size * (width + 1)


def head_peak_bytes(model: ModelConfig, compute: ComputeConfig, bf16: bool, predicted: int) -> int:
    """Return the bytes that the loss needs while it works on a chunk of logits, beyond `outside_bytes`.

    The gradient of a chunk's logits cV, and in bf16 also the logits, 4V in fp32 or, compiled, cV; for a small chunk its
    contribution to the decoder's gradient instead, cVD; and the head's output in the products' precision.
    """
    c = 2 if bf16 else 4
    chunk = min(predicted, compute.logits_at_once(model.vocab_size, on_gpu=True, bytes_per_logit=c))
    logit = c if not bf16 else 2 * c if compute.compile else c + 4
    width = model.hidden_size if bf16 else 0
    return max(logit * chunk, c * (chunk + width)) * model.vocab_size + 2 * width * predicted


def vectors_bytes(model: ModelConfig, bf16: bool, tokens: int, step_tokens: int, texts: int) -> int:
    """Return the bytes saved outside the layers in the second pass, if texts are compared.

    Per token: `entry_bytes`, input and statistics of the last norm, and the input of the mean. In addition: the
    gradient by each vector of the global batch, and a copy of it in the targets of all microbatches, which are padded
    to one text for every three tokens.

    Args:
        model, bf16: see `memory`.
        tokens: tokens of one microbatch.
        step_tokens: tokens of all microbatches of this rank.
        texts: texts of the global batch.
    """
    width = model.hidden_size
    per_token = entry_bytes(model, bf16) + 4 * width + 8 + 4 * width
    return per_token * tokens + 4 * width * (texts + step_tokens // 3)


def compared_bytes(width: int, texts: int, queries: int, candidates: int, *, symmetric: bool) -> int:
    """Return the peak bytes of comparing a global batch's texts on one rank, `compare` of models/contrastive.py.

    The larger of two moments, in fp32: nine times the vectors of all texts (vectors of this rank and of all, their
    gradient, directions, selected directions, and gradients of these), or six times and four numbers (seven if
    `symmetric`) for each cosine computed at the same time.

    Args:
        width: width of a vector.
        texts: texts of the global batch.
        queries: queries of this rank.
        candidates: positives and negatives of the global batch.
        symmetric: see `ContrastiveConfig`.
    """
    vectors = 4 * width * texts
    cosines = 4 * max(candidates, min(COSINES, queries * candidates))
    return 2 * vectors + max(7 * vectors, 4 * vectors + int((7.2 if symmetric else 4.2) * cosines))


def compared_tokens_bytes(width: int, tokens: int) -> int:
    """Estimate the bytes of late interaction between the two passes, see models/maxsim.py; never measured.

    For every token of the global batch, pads too, eight vectors in fp32: its own, that normalised, and six for
    gradients and transfers between ranks; and five numbers for each of the 2^25 products computed at a time. Tensors
    with one vector per text are too small to count.
    """
    return 4 * (8 * width * tokens + 5 * (1 << 25))


def matrix_numbers(parameters: Parameters, optim: OptimConfig) -> int:
    """Return the size of Muon's state for matrices: one number per entry, for NorMuon also one per row; else 0."""
    if not optim.newton_schulz_iterations:
        return 0
    return parameters.hidden + (parameters.hidden_rows if optim.row_beta is not None else 0)


def summed_numbers(parameters: Parameters, optim: OptimConfig) -> int:
    """Return the numbers summed over the shards of a weight, three for each: StableAdamW, and Muon with it."""
    return 3 * parameters.weights if optim.bounds_update else 0


def moment_numbers(parameters: Parameters, optim: OptimConfig) -> int:
    """Return the number of values in an optimizer's state for a model."""
    return optim.state_numbers(parameters.trained, parameters.hidden, parameters.hidden_rows)


def checkpoint_bytes(model: ModelConfig, objective: ObjectiveConfig, optim: OptimConfig) -> int:
    """Return the bytes of the tensors in one checkpoint: weights and the optimizer's state, fp32."""
    parameters = count_parameters(model, objective)
    return 4 * (parameters.total + moment_numbers(parameters, optim))


def step_numbers(parameters: Parameters, optim: OptimConfig, shards: int) -> int:
    """Return the numbers that a step needs temporarily, over all shards.

    StableAdamW needs two a weight, AdamW one. Muon needs its directions, plus StableAdamW's for the rest; on shards
    first three copies of the matrices, of which two are exchanged.
    """
    if not optim.newton_schulz_iterations:
        return (2 if optim.bounds_update else 1) * parameters.trained
    unsharded = parameters.hidden + 2 * (parameters.trained - parameters.hidden)
    return unsharded if shards == 1 else max(unsharded, 3 * parameters.hidden)


def memory(
    model: ModelConfig,
    compute: ComputeConfig,
    parameters: Parameters,
    *,
    optim: OptimConfig,
    bf16: bool,
    strategy: Strategy,
    shards: int,
    ranks: int,
    tokens: int,
    predicted: int | None,
    step_tokens: int = 0,
    step_texts: int = 0,
) -> Memory:
    """Predict the memory of one GPU by part.

    Args:
        model: the encoder.
        compute: how it is computed.
        parameters: the encoder's counts, for these shards.
        optim: the optimizer.
        bf16: autocast over fp32 weights.
        strategy: how ranks share the model.
        shards: ranks that share one copy of the weights, see `sharing_ranks`.
        ranks: ranks of the run; with one there is no communication.
        tokens, predicted: T and M of one microbatch; `predicted` is None if texts are compared.
        step_tokens, step_texts: used if texts are compared, see `vectors_bytes`.
    """
    c = 2 if bf16 else 4
    copies = 2 * parameters.matrices if bf16 else 0  # autocast casts each matrix once for the whole pass, shards too
    if strategy == "ddp" or ranks == 1:
        # DDP's buckets hold a second copy of the gradients until the last microbatch; then they are the gradients
        buffers = 4 * parameters.trained if ranks > 1 else 0
    else:
        # weights are gathered in fp32: the root stays; one layer computes while the next arrives
        copies += 4 * (parameters.root + 2 * parameters.layer)
        # flat buffers: two layers arriving; the root's gradient, unsharded, and again to be reduced
        buffers = 8 * parameters.layer + 8 * parameters.root
    layers = layers_bytes(model, compute, bf16, tokens)
    if predicted is None:
        head = vectors_bytes(model, bf16, tokens, step_tokens, step_texts)
    else:
        head = outside_bytes(model, compute, bf16, tokens, predicted) + head_peak_bytes(model, compute, bf16, predicted)
    if compute.activation_checkpointing:
        # after the head a layer is recomputed, with gradients of the residual and of the gate's product
        again = layer_bytes(model, compute, bf16) + _residual_bytes(model, compute) + c * model.intermediate_size
        layers += max(0, again * tokens - head)
    return Memory(
        weights=4 * -(-parameters.total // shards),
        gradients=4 * -(-parameters.trained // shards),
        moments=4 * -(-moment_numbers(parameters, optim) // shards),
        copies=copies,
        buffers=buffers,
        layers=layers,
        head=head,
        step=4 * -(-step_numbers(parameters, optim, shards) // shards),
    )
