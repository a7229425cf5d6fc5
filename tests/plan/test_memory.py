"""Memory by part, compared with autograd and the allocator: a plan that says "fits" must fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from modernbert_train.config.classify import ClassifyConfig, LoraConfig
from modernbert_train.config.schema import (
    ComputeConfig,
    EsmConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
    MuonConfig,
    NorMuonConfig,
    OptimConfig,
    StableAdamWConfig,
)
from modernbert_train.models import attention
from modernbert_train.models.attention import varlen
from modernbert_train.models.build import build_model
from modernbert_train.models.lora import add_adapters
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.optim.optimizers import build_optimizer
from modernbert_train.plan.gpus import GPUS
from modernbert_train.plan.memory import (
    Memory,
    adapters_bytes,
    entry_bytes,
    layers_bytes,
    memory,
    outside_bytes,
    sharing_ranks,
)
from modernbert_train.plan.parameters import count_parameters
from tests.support.gloo import run_ranks
from tests.support.kept_memory import PLAIN, RECOMPUTED, SMALL, Attend, autocast, kept_bytes, running_total, use_kernel
from tests.support.plan_batches import make_batch

BASE = ModernBertConfig(attention_out_dropout=0.0)
SMALL_ESM = EsmConfig(vocab_size=8192, hidden_size=192, num_heads=3, intermediate_size=768)


@torch.library.custom_op("plan_test::attend", mutates_args=())
def _attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor) -> tuple[Tensor, Tensor]:
    return q_TNH.clone(), torch.zeros(q_TNH.shape[1], q_TNH.shape[0])


@torch.library.custom_op("plan_test::attend_backward", mutates_args=())
def _attend_backward(grad_TNH: Tensor, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lse: Tensor) -> Tensor:
    return grad_TNH.clone()


_attend.register_fake(lambda q, k, v: (torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])))
_attend_backward.register_fake(lambda grad, q, k, v, lse: torch.empty_like(grad))


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_TNH: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, _out, lse = ctx.saved_tensors
    grad = _attend_backward(grad_TNH.contiguous(), q, k, v, lse)
    return grad, grad.clone(), grad.clone()


_attend.register_autograd(_backward, setup_context=_setup)


def saved(model: nn.Module, batch: Any, bf16: bool) -> int:
    """Return `kept_bytes` of a forward pass."""
    with kept_bytes(model) as kept, autocast(bf16):
        loss = model(batch).losses["mlm"]
    assert loss.requires_grad
    return sum(kept.values())


class NoProducts(TorchDispatchMode):
    """Replaces products of matrices by zeros: in bf16 they take a CPU twenty seconds, and memory ignores values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return args[0].new_zeros(args[0].shape[0], args[1].shape[1])
        if func is torch.ops.aten.addmm.default:
            return args[1].new_zeros(args[1].shape[0], args[2].shape[1])
        return func(*args, **(kwargs or {}))


def decoded(config: ModelConfig) -> int:
    """Count the weights whose bf16 copies autograd saves: all matrices but the decoder's."""
    return count_parameters(config).matrices - config.vocab_size * config.hidden_size


def norm_on_cpu(config: ModelConfig, bf16: bool, predicted: int) -> int:
    """Return the bytes that a CPU's autocast saves in the head: its norm is in bf16 there, on a GPU in fp32."""
    return 2 * 2 * config.hidden_size * predicted if bf16 else 0


@pytest.mark.runs
@pytest.mark.parametrize("config", [BASE, EsmConfig(vocab_size=8192)], ids=["modernbert-base", "esm2-150m"])
@pytest.mark.parametrize(
    ("bf16", "checkpointing"),
    [
        pytest.param(True, False, id="bf16-kept"),
        pytest.param(False, True, id="fp32-checkpointed", marks=pytest.mark.slow),
        pytest.param(True, True, id="bf16-checkpointed", marks=pytest.mark.slow),
        pytest.param(False, False, id="fp32-kept", marks=pytest.mark.slow),
    ],
)
def test_98304_tokens_keep_the_predicted_bytes(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, bf16: bool, checkpointing: bool
) -> None:
    """At published sizes, with the kernel of GPUs: fake tensors have shapes and storages, but use no memory."""
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: varlen)
    compute = ComputeConfig(activation_checkpointing=checkpointing)
    tokens, predicted = 96 * 1024, 29_528
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(config, MaskedLmConfig(), compute).train()
        found = saved(model, make_batch([1024] * 96, predicted), bf16)
    told = layers_bytes(config, compute, bf16, tokens) + outside_bytes(config, compute, bf16, tokens, predicted)
    if checkpointing:  # copies of the layers' weights are freed with the other tensors
        weights = config.hidden_size**2
        told -= (
            entry_bytes(config, bf16) - entry_bytes(config, True)
        ) * tokens  # rotary tables, an argument in this case
    else:
        weights = decoded(config)
    assert told + 2 * weights * bf16 - norm_on_cpu(config, bf16, predicted) == pytest.approx(found, rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "residual"), [(SMALL, "fp32"), (SMALL, "bf16"), (SMALL_ESM, "fp32")], ids=["fp32", "bf16", "esm"]
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_layers_keep_the_predicted_bytes(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, residual: Any, checkpointing: bool
) -> None:
    """torch.compile decides which tensors to save before it generates code, always by the same function."""
    use_kernel(monkeypatch, lambda q, k, v, layout, window: _attend(q, k, v)[0])
    config = replace(config, num_layers=4)
    compute = ComputeConfig(residual_precision=residual, compile=True, activation_checkpointing=checkpointing)
    model = build_model(config, MaskedLmConfig(), compute).train()
    backend = "aot_eager_decomp_partition"
    model.compile_layers(backend=backend)
    batch = make_batch([128, 128], 78)
    found = saved(model, batch, True)
    told = layers_bytes(config, compute, True, 256) + outside_bytes(config, compute, True, 256, 78)
    if residual == "fp32" and not checkpointing and config.name == "modernbert":
        told += 3 * (4 - 2) * config.hidden_size * 256  # on a CPU it saves the sum in fp32, not the bf16 summand
    weights = config.hidden_size**2 if checkpointing else decoded(config)
    assert told + 2 * weights - norm_on_cpu(config, True, 78) == pytest.approx(found, rel=0.02)


def planned(
    config: ModernBertConfig,
    bf16: bool,
    tokens: int = 0,
    predicted: int = 0,
    compute: ComputeConfig = PLAIN,
    **more: Any,
) -> Memory:
    settings: dict[str, Any] = {"optim": StableAdamWConfig(lr=1.0), "strategy": "ddp", "shards": 1, "ranks": 1}
    counts = count_parameters(config)
    return memory(config, compute, counts, bf16=bf16, tokens=tokens, predicted=predicted, **(settings | more))


@pytest.mark.runs
@pytest.mark.parametrize(
    ("config", "compute", "bf16", "rel"),
    [
        (SMALL, PLAIN, True, 0.02),
        (SMALL, PLAIN, False, 0.02),
        (SMALL, replace(PLAIN, logit_chunk=320), True, 0.02),
        (replace(SMALL, vocab_size=512), PLAIN, True, 0.02),
        (SMALL, RECOMPUTED, True, 0.1),
        (replace(SMALL, vocab_size=512), RECOMPUTED, True, 0.1),
    ],
    ids=["bf16", "fp32", "loss in chunks", "small head", "checkpointed", "checkpointed, small head"],
)
def test_the_highest_point_of_a_step_is_the_predicted_one(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: ModernBertConfig,
    compute: ComputeConfig,
    bf16: bool,
    rel: float,
) -> None:
    """The allocator's own record of a second forward and backward pass, when gradients exist."""
    use_kernel(monkeypatch, lambda q, k, v, layout, window: Attend.apply(q, k, v))
    model = ModernBertForMaskedLM(config, compute).train()
    batch = make_batch([512] * 4, 640)

    def step() -> None:
        with NoProducts():
            with autocast(bf16):
                loss = model(batch).losses["mlm"]
            loss.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    record.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")
    told = planned(config, bf16, tokens=2048, predicted=640, compute=compute)
    assert told.copies + told.layers + told.head == pytest.approx(found, rel=rel)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL_ESM, num_layers=4)], ids=["modernbert", "esm"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("bf16", [False, True])
def test_adapters_keep_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, config: ModelConfig, bf16: bool, dropout: float
) -> None:
    """Their gradients and moments are those of the adapters alone, so a larger microbatch fits."""
    use_kernel(monkeypatch, lambda q, k, v, layout, window: Attend.apply(q, k, v))
    lora, tokens, predicted = LoraConfig(rank=8, dropout=dropout), 1024, 300
    model = build_model(config, MaskedLmConfig(), PLAIN).train()
    model.model.requires_grad_(False)
    add_adapters(model.model.layers, lora)
    found = saved(model, make_batch([128] * 8, predicted), bf16)
    told = layers_bytes(config, PLAIN, bf16, tokens) + outside_bytes(config, PLAIN, bf16, tokens, predicted)
    told += adapters_bytes(config, lora, bf16, tokens) + 2 * decoded(config) * bf16
    assert 0.95 * told < found < 1.005 * told
    objective = ClassifyConfig(labels=("a", "b"), lora=lora)
    own, all_weights = (count_parameters(config, each) for each in (objective, replace(objective, lora=None)))
    settings: dict[str, Any] = {"optim": StableAdamWConfig(), "bf16": bf16, "strategy": "ddp", "shards": 1, "ranks": 2}
    settings |= {"tokens": tokens, "predicted": predicted}
    mine, theirs = (memory(config, PLAIN, each, **settings) for each in (own, all_weights))
    assert mine.gradients == 4 * own.trained == mine.buffers and mine.moments == 8 * own.trained
    assert own.trained < 0.1 * all_weights.trained and mine.peak < theirs.peak - 3 * theirs.gradients


@pytest.mark.runs
@pytest.mark.parametrize(("kind", "rel"), [(StableAdamWConfig, 0.05), (MuonConfig, 0.1), (NorMuonConfig, 0.1)])
def test_weights_gradients_moments_and_the_optimizers_step(kind: type[OptimConfig], rel: float) -> None:
    """Memory that persists from step to step, and the temporaries of the optimizer."""
    model, optim = ModernBertForMaskedLM(SMALL), kind(lr=1e-3)
    optimizer = build_optimizer(optim, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    told = planned(SMALL, True, optim=optim)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert told.moments == sum(value.nbytes for value in states if value.ndim)
    assert told.weights == sum(parameter.nbytes for parameter in model.parameters()) == told.gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        optimizer.step()
    assert max(running_total(record)) == pytest.approx(told.step, rel=rel)


def test_sharding_divides_what_lasts() -> None:
    whole = planned(BASE, True, ranks=16)
    sharded = planned(BASE, True, strategy="fsdp2", shards=16, ranks=16)
    assert sharded.weights == -(-4 * 149_655_232 // 16) and sharded.moments == 2 * sharded.weights
    assert sharded.layers == whole.layers and sharded.head == whole.head
    assert whole.buffers == whole.gradients and planned(BASE, True, ranks=1).buffers == 0
    counts = count_parameters(BASE)
    assert whole.copies == 2 * counts.matrices  # bf16; on shards also the weights gathered in fp32
    assert sharded.copies == whole.copies + 4 * (counts.root + 2 * counts.layer)
    assert sharded.peak < whole.peak


FEW = replace(SMALL, vocab_size=512, num_layers=2)


def saved_whole_and_on_shards() -> list[int]:
    """Return the bytes that autograd saves on one rank, without FSDP2 and with it."""
    found = []
    for sharded in (False, True):
        model = ModernBertForMaskedLM(FEW).train()
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        found.append(saved(model, make_batch([40, 24], 20), True))
    return found


@pytest.mark.runs
def test_copies_in_bf16_are_kept_on_shards_too() -> None:
    """FSDP2 frees a finished layer's fp32 weights; autocast's bf16 copies stay until its backward pass."""
    ((whole, sharded),) = run_ranks(saved_whole_and_on_shards, 1)
    assert whole > 2 * count_parameters(FEW).matrices
    assert sharded == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "ranks", "shard_ranks", "expected"),
    [("ddp", 16, None, 1), ("fsdp2", 16, None, 16), ("hsdp", 16, None, 8), ("hsdp", 16, 4, 4), ("hsdp", 4, None, 4)],
)
def test_ranks_that_share_the_weights(strategy: Any, ranks: int, shard_ranks: int | None, expected: int) -> None:
    assert sharing_ranks(strategy, ranks, shard_ranks, GPUS["h100"]) == expected


def test_a_step_is_at_its_highest_before_or_in_the_optimizer() -> None:
    """Activations are freed before the optimizer needs memory: the two do not add up."""
    lasting = planned(SMALL, True)
    few, many = planned(SMALL, True, tokens=8, predicted=3), planned(SMALL, True, tokens=8192, predicted=2500)
    assert few.peak == lasting.weights + lasting.gradients + lasting.moments + few.step
    assert many.peak == lasting.weights + lasting.gradients + lasting.moments + many.copies + many.layers + many.head
