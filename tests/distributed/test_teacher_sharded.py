"""A teacher whose weights ranks share. If this breaks, a student under FSDP2 learns from something else than its
teacher, or each GPU holds all of it."""

from __future__ import annotations

from typing import Any

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
ENCODERS: dict[str, ModelConfig] = {
    "modernbert": ModernBertConfig(**SIZE, local_attention=8),  # type: ignore[arg-type]
    "bert": BertConfig(**SIZE, max_positions=32),  # type: ignore[arg-type]
}


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


def whole_and_sharded() -> list[dict[str, Any]]:
    """On one of the ranks."""
    found = []
    for name, config in ENCODERS.items():
        for bf16 in (False, True):
            teacher, whole = made(config, bf16), made(config, bf16)
            teacher.shard(init_device_mesh("cpu", (2,)))
            same = all(torch.equal(ours, theirs) for ours, theirs in zip(asked(teacher), asked(whole), strict=True))
            weights = [each for each in teacher.model.parameters() if isinstance(each, DTensor)]
            held = sum(each.to_local().numel() for each in weights)
            plain = [each for each in teacher.model.parameters() if not isinstance(each, DTensor)]
            found.append(
                {
                    "name": name, "same": same, "held": held, "all": sum(each.numel() for each in weights),
                    "beside": sum(each.numel() for each in plain),
                    "trained": any(each.requires_grad for each in (*weights, *plain)),
                }
            )  # fmt: skip
    return found


@pytest.mark.runs
def test_it_says_the_same_of_shares_of_its_weights() -> None:
    """To the bit, in fp32 and in bf16; after each layer a rank is left with half of it, and nothing gets a gradient."""
    for rank in run_ranks(whole_and_sharded, 2):
        for each in rank:
            assert each["same"] and not each["trained"], each["name"]
            assert each["held"] <= 0.55 * each["all"]
            assert each["beside"] < 36 * 36 + 4 * 160, "the head alone, and no table"
