"""A teacher whose weights ranks share. If this breaks, a student under FSDP2 learns from something else than its
teacher, or each GPU holds all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.batches import lay_out
from modernbert_train.config.schema import BertConfig, MaskedLmConfig, ModelConfig, ModernBertConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.distilled import Teacher
from modernbert_train.models.init import initialize
from tests.support.gloo import run_ranks

SIZE = {"vocab_size": 160, "hidden_size": 36, "num_layers": 4, "num_heads": 2, "intermediate_size": 22, "init_std": 0.1}
ENCODERS: tuple[ModelConfig, ...] = (
    ModernBertConfig(**SIZE, local_attention=8),  # type: ignore[arg-type]
    BertConfig(**SIZE, max_positions=32),  # type: ignore[arg-type]
)


def made(config: ModelConfig, bf16: bool) -> Teacher:
    model = build_model(config, MaskedLmConfig())
    initialize(model, config, seed=3)
    return Teacher(model, bf16=bf16)


def asked(teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Return its states and logits; twice, since weights freed after a layer must be gathered again."""
    packed = lay_out(torch.arange(5, 37), [0, 20, 32], 32)
    for _ in range(2):
        states_TE = teacher.states(packed)
        logits_CV = teacher.logits(teacher.transformed(states_TE, torch.tensor([3, 21])))
    return states_TE, logits_CV


def compare_whole_and_sharded() -> None:
    """Compare them on one of the ranks."""
    for config in ENCODERS:
        for bf16 in (False, True):
            teacher, whole = made(config, bf16), made(config, bf16)
            teacher.shard(init_device_mesh("cpu", (2,)))
            torch.testing.assert_close(asked(teacher), asked(whole), rtol=0, atol=0)
            parameters = list(teacher.model.parameters())
            assert not any(each.requires_grad for each in parameters)
            shards = [each for each in parameters if isinstance(each, DTensor)]
            held = sum(each.to_local().numel() for each in shards)
            assert 0 < held <= 0.55 * sum(each.numel() for each in shards)
            whole_weights = sum(each.numel() for each in parameters if not isinstance(each, DTensor))
            assert whole_weights < 36 * 36 + 4 * 160, "the head alone, and no table"


@pytest.mark.runs
def test_it_says_the_same_of_shares_of_its_weights() -> None:
    """To the bit, in fp32 and in bf16; after each layer a rank is left with half of it, and nothing gets a gradient."""
    run_ranks(compare_whole_and_sharded, 2)
