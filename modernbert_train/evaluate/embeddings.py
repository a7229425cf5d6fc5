"""Texts -> embeddings: the mean of an encoder's last hidden states over the tokens of each text.

[CLS] and [SEP] count, as in sentence-transformers' mean pooling of an exported model. Each text is its own
sequence between [CLS] and [SEP], under every objective; its tokens attend to each other as the objective allows for
input that is not predicted. Microbatches are the same for any number of ranks and have training's size, so a compiled
model does not recompile.

Shape legend: N texts, T packed tokens, Q sequences of a microbatch, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from modernbert_train.batch import Inputs, Packed, PackedText
from modernbert_train.clock import Position
from modernbert_train.config.objective import Order
from modernbert_train.config.schema import ObjectiveConfig, PhaseConfig
from modernbert_train.core.keyed_random import Keys
from modernbert_train.data.microbatches import MicrobatchMaker, share_of_rank
from modernbert_train.data.packing import SPECIAL_TOKENS, WINDOW, Chunk, GreedyPacker
from modernbert_train.data.planner import BatchPlan, Row
from modernbert_train.distributed.compute import Compute
from modernbert_train.distributed.group import num_ranks, sum_over_ranks, this_rank
from modernbert_train.models.encoder import OnEncoder
from modernbert_train.vocabulary import Vocabulary

_SPANS = "spans_Q2"


def max_tokens(phase: PhaseConfig) -> int:
    """Return the longest text that fits a row of a phase, without special tokens; longer texts are cut."""
    return phase.row_tokens - SPECIAL_TOKENS


@torch.no_grad()
def embed(
    model: OnEncoder,
    texts: Sequence[NDArray[np.int32]],
    vocabulary: Vocabulary,
    now: Position,
    compute: Compute,
) -> Tensor:
    """Embed texts; every rank calls it, computes its share, and gets all embeddings.

    Args:
        model: in the phase; its training mode is restored afterwards.
        texts: token ids without special tokens.
        vocabulary: of the tokenizer.
        now, compute: see `Evaluator`.

    Returns:
        embeddings_ND: fp32, on the CPU.
    """
    plan = plan_rows([len(ids) for ids in texts], now.phase, ObjectiveConfig(name="none"))
    maker = MicrobatchMaker(_Texts(texts), lambda settings: _Plain(now.objective.plain_order), vocabulary)
    mine = share_of_rank(plan.rows, this_rank(), num_ranks(), plan.microbatch_rows)
    numbers = iter([chunk.document for row in mine for chunk in row])
    embeddings_ND = torch.zeros(len(texts), now.model.hidden_size, device=compute.device)
    was_training = model.training
    model.eval()
    with entered(model, "encode"):
        for batch in maker.microbatches(mine, plan):
            with torch.autocast(compute.device.type, torch.bfloat16, enabled=compute.bf16):
                hidden_TD = model.encode(batch.packed.to(compute.device)).float()
            for first, end in batch.targets[_SPANS].tolist():
                embeddings_ND[next(numbers)] = hidden_TD[first:end].mean(dim=0)
    model.train(was_training)
    sum_over_ranks(embeddings_ND)  # each rank has zeros for the others' texts, so the sums are exact
    return embeddings_ND.cpu()


@torch.no_grad()
def embed_packed(
    model: OnEncoder,
    texts: Sequence[NDArray[np.int32]],
    vocabulary: Vocabulary,
    compute: Compute,
    *,
    order: Order,
    max_tokens: int,
    pooling: Literal["cls", "mean"],
    batch_tokens: int,
) -> Tensor:
    """Embed texts in this process only, concatenated without rows; on CUDA each pass is padded to one size.

    Args:
        model: not sharded, in evaluation mode.
        texts: token ids without special tokens.
        vocabulary: of the tokenizer.
        compute: the model's device and precision.
        order: the positions that a token attends to.
        max_tokens: maximum length, special tokens included; longer texts are cut.
        pooling: over all tokens, or [CLS] alone.
        batch_tokens: maximum tokens of one forward pass; a longer text gets a pass alone.

    Returns:
        embeddings_ND: fp32, on the CPU, in the order of the texts.
    """
    pooled = [torch.zeros(0, model.config.hidden_size)]
    for group in _groups([ids[: max_tokens - SPECIAL_TOKENS] for ids in texts], batch_tokens):
        lengths = [len(ids) + SPECIAL_TOKENS for ids in group]
        pieces = [piece for ids in group for piece in ([vocabulary.cls_id], ids, [vocabulary.sep_id])]
        if compute.device.type == "cuda":  # one shape, so that a compiled kernel serves all
            room = -sum(lengths) % batch_tokens
            pieces.append([vocabulary.pad_id] * room)
            lengths += [min(max_tokens, room - done) for done in range(0, room, max_tokens)]
        packed = Packed(
            torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
            torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
            torch.tensor([0, *lengths]).cumsum(0).int(),
            max_seqlen=max(lengths),
            order=order,
        )
        with compute.autocast():
            hidden_TD = model.encode(packed.to(compute.device)).float()
        sizes = torch.tensor(lengths[: len(group)], device=hidden_TD.device)
        if pooling == "mean":
            pooled_ND = torch.segment_reduce(hidden_TD[: int(sizes.sum())], "mean", lengths=sizes)
        else:
            pooled_ND = hidden_TD[sizes.cumsum(0) - sizes]
        pooled.append(pooled_ND.cpu())
    return torch.cat(pooled)


def _groups(texts: Sequence[NDArray[np.int32]], batch_tokens: int) -> Iterator[list[NDArray[np.int32]]]:
    """Yield groups of adjacent texts of at most `batch_tokens` tokens, special tokens included."""
    group: list[NDArray[np.int32]] = []
    tokens = 0
    for ids in texts:
        size = len(ids) + SPECIAL_TOKENS
        if group and tokens + size > batch_tokens:
            yield group
            group, tokens = [], 0
        group.append(ids)
        tokens += size
    if group:
        yield group


def plan_rows(lengths: Iterable[int], phase: PhaseConfig, objective: ObjectiveConfig) -> BatchPlan:
    """Pack all texts into rows of the phase's length, and add empty rows until every rank has whole microbatches."""
    packer = GreedyPacker(phase.row_tokens, WINDOW, 1 << 62)
    for number, length in enumerate(lengths):
        packer.place(Chunk(0, number, 0, min(int(length), max_tokens(phase))))
    packer.flush()
    block = max(1, phase.microbatch_rows)
    rows: tuple[Row, ...] = tuple(packer.ready)
    rows += ((),) * (-len(rows) % (block * num_ranks()))
    return BatchPlan(
        phase="evaluation",
        tokens_before=0,
        tokens=0,
        rows=rows,
        num_rows=len(rows),
        row_tokens=phase.row_tokens,
        microbatch_rows=block,
        objective=objective,
    )


class _Texts:
    """Texts with the interface of `Documents`, for the microbatch maker; none of them is masked."""

    def __init__(self, texts: Sequence[NDArray[np.int32]]) -> None:
        self._texts = texts

    def read(self, document: int) -> NDArray[np.int32]:
        return self._texts[document]

    def inside_words(self, document: int) -> NDArray[np.bool_]:
        return np.zeros(len(self._texts[document]), dtype=bool)

    def mask_keys(self, chunks: Sequence[Chunk]) -> Keys:
        return np.zeros(len(chunks), dtype=np.uint64)

    def labels(self, chunks: Sequence[Chunk]) -> None:
        return None


class _Plain:
    """Unmasked text: a stand-in for an objective that predicts nothing and only sets positions."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def make(self, text: PackedText, settings: Any) -> Inputs:
        firsts_Q = text.starts_Q - 1  # [CLS]
        spans_Q2 = np.stack([firsts_Q, firsts_Q + text.lengths_Q + SPECIAL_TOKENS], axis=1)
        return Inputs(text.ids_T, {_SPANS: spans_Q2}, {}, order=self._order)


@contextmanager
def entered(model: OnEncoder, method: str) -> Iterator[OnEncoder]:
    """Within the block, an FSDP2-sharded model gathers its weights for a method as it does for `forward`.

    Only within the block: forward calls the method too, and would gather twice.
    """
    if not isinstance(model, FSDPModule):
        yield model
        return
    register_fsdp_forward_method(model, method)
    try:
        yield model
    finally:
        delattr(model, method)  # restore the model's own method
        model.reshard()  # without a backward pass, weights outside the layers stay gathered
