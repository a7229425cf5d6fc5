"""A microbatch on its way: from a worker to the main process, through pinned memory, onto the device.

If this breaks, tensors change places, so that token types are read as boundaries, or what an objective
made stays behind.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.batches import labels_of_line
from modernbert_train.batch import IGNORED_LABEL, Batch, Inputs, Order, Packed, PackedText
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.loader import StepBatch, _divide
from modernbert_train.data.microbatches import MicrobatchMaker
from modernbert_train.vocabulary import read_vocabulary
from tests.support.batches import make_path, same


def microbatch(first: int, order: Order = "all", segments: bool = False, extra: bool = False) -> Batch:
    """Of 12 tokens, as a worker makes it, all of its numbers different; with what only some objectives have."""

    def numbers(count: int) -> Tensor:
        nonlocal first
        first += count
        return torch.arange(first - count, first, dtype=torch.int32)

    packed = Packed(numbers(12), numbers(12), numbers(4), 12, numbers(12) if segments else None, order)
    if order == "given":
        packed = replace(packed, ranks_T=numbers(12), limits_T=numbers(12))
    targets = {"positions_M": numbers(5), "labels_M": numbers(5)} | ({"is_next_Q": numbers(2)} if extra else {})
    return Batch(packed, targets, {"mlm": 4, "nsp": 2} if extra else {"mlm": 4}, num_tokens=11, num_rows=2)


NUMBERS = attrgetter("packed.order", "counts", "num_tokens", "num_rows")
KINDS = {
    "plain": [microbatch(0), microbatch(100)],
    "token types": [microbatch(0, segments=True), microbatch(100, segments=True)],
    "causal": [microbatch(0, "causal"), microbatch(100, "causal")],
    "given": [microbatch(0, "given"), microbatch(100, "given", segments=True)],
    "several targets": [microbatch(0, "causal", segments=True, extra=True)],
    "no two alike": [microbatch(0, segments=True), microbatch(100, "causal"), microbatch(200, extra=True)],
}


@pytest.mark.parametrize("microbatches", KINDS.values(), ids=KINDS.keys())
def test_what_a_worker_sends_is_what_arrives(config: RunConfig, microbatches: list[Batch]) -> None:
    """Token types, order, targets and counts too; always as one tensor."""
    step = StepBatch(tuple(microbatches), next(make_path(config).planned.planner))
    arrived: StepBatch = pickle.loads(pickle.dumps(step))
    pinned = _divide(step._joined(), step._sizes(), step.plan)  # as pin_memory makes it, where there is a GPU
    for other in (arrived, pinned):
        assert other.plan == step.plan
        assert all(same(one, two) for one, two in zip(step.microbatches, other.microbatches, strict=True))
        storages = {tensor.untyped_storage().data_ptr() for part in other.microbatches for tensor in part.tensors()}
        assert len(storages) == 1


@pytest.mark.parametrize("microbatches", KINDS.values(), ids=KINDS.keys())
def test_on_the_device_torch_can_index_by_everything(microbatches: list[Batch]) -> None:
    """int64 where torch asks for it; boundaries stay int32, as kernels take them."""
    for batch in microbatches:
        ready = batch.to("cpu")
        assert NUMBERS(ready) == NUMBERS(batch)
        assert (ready.packed.segment_ids_T is None) == (batch.packed.segment_ids_T is None)
        assert ready.packed.cu_seqlens_S.dtype == torch.int32
        wide = [tensor for tensor in ready.tensors() if tensor is not ready.packed.cu_seqlens_S]
        assert {tensor.dtype for tensor in wide} == {torch.int64} and len(wide) == len(batch.tensors()) - 1
        for one, two in zip(ready.tensors(), batch.tensors(), strict=True):
            assert one.tolist() == two.tolist()
        assert {tensor.device.type for tensor in batch.to("meta").tensors()} == {"meta"}


class Everything:
    """An objective that asks for all that there is."""

    def make(self, text: PackedText, settings: Any) -> Inputs:
        targets = {"starts_Q": text.starts_Q, "nothing_N": np.zeros(0, dtype=np.int64)}
        segments_T = np.arange(len(text.ids_T)) % 2
        return Inputs(text.ids_T + 1, targets, {"all": len(text.starts_Q)}, segments_T, order="causal")


def test_what_an_objective_makes_reaches_the_encoder(config: RunConfig) -> None:
    """Its ids, token types and order, and its own targets and counts; loaded, sent and put on the device."""
    path, plan = make_path(config), next(make_path(config).planned.planner)
    maker = MicrobatchMaker(path.streams, lambda settings: Everything(), read_vocabulary(config.data.tokenizer))
    usual = list(path.maker.microbatches(plan.rows, plan))
    found = list(maker.microbatches(plan.rows, plan))
    step: StepBatch = pickle.loads(pickle.dumps(StepBatch(tuple(found), plan)))
    for batch, other in zip(step.microbatches, usual, strict=True):
        ready, masked_T = batch.to("cpu"), labels_of_line(other)
        kept_T = masked_T == IGNORED_LABEL
        assert torch.equal(ready.packed.input_ids_T[kept_T], other.packed.input_ids_T.long()[kept_T] + 1)
        assert ready.packed.segment_ids_T is not None
        assert ready.packed.segment_ids_T.tolist() == [place % 2 for place in range(len(masked_T))]
        assert ready.packed.order == "causal" and other.packed.order == "all"
        assert ready.packed.cu_seqlens_S.tolist() == other.packed.cu_seqlens_S.tolist()
        cls_id = read_vocabulary(config.data.tokenizer).cls_id
        assert (ready.packed.input_ids_T[ready.targets["starts_Q"] - 1] == cls_id + 1).all()
        assert ready.counts == {"all": len(ready.targets["starts_Q"])} and len(ready.targets["nothing_N"]) == 0
        assert (ready.num_tokens, ready.num_rows) == (other.num_tokens, other.num_rows)


def test_a_tensor_that_would_lose_digits_does_not_travel(config: RunConfig) -> None:
    """Joined with int32, fp32 would round token ids in silence."""
    batch = microbatch(0)
    step = StepBatch((replace(batch, targets={"weights_M": torch.ones(3)}),), next(make_path(config).planned.planner))
    with pytest.raises(TypeError, match=r"one int32 tensor, and it has others: \['torch.float32'\]"):
        pickle.dumps(step)
