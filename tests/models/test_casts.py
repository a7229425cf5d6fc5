"""Weights are cast to bf16 once a step, however many microbatches it has, and nothing of the result shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modernbert_train.batch import Batch
from modernbert_train.distributed.compute import Compute
from modernbert_train.models.casts import Linear
from modernbert_train.train import gradients as making
from modernbert_train.train.gradients import gradients
from tests.support.encoder_training import pack, sequences, small
from tests.support.encoders import build
from tests.support.operators import Operators

CPU = torch.device("cpu")
MICROBATCHES = 4


@contextmanager
def counted_casts() -> Iterator[Counter[tuple[int, ...]]]:
    """How often matrices of each shape are cast from fp32 to bf16."""
    matrices: Counter[tuple[int, ...]] = Counter()

    def see(func: Any, args: Any, kwargs: Any, found: Any) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        if func is torch.ops.aten._to_copy.default:
            pairs = [(found, args[0])]
        elif func is torch.ops.aten._foreach_copy_.default:
            pairs = list(zip(*args, strict=True))
        for to, source in pairs:
            if (to.dtype, source.dtype) == (torch.bfloat16, torch.float32):
                matrices[tuple(to.shape)] += 1

    with Operators(see):
        yield matrices


def step_of(batches: list[Batch]) -> Any:
    return SimpleNamespace(
        plan=SimpleNamespace(objective=SimpleNamespace(terms={"mlm": 1.0}, compares=False)), microbatches=tuple(batches)
    )


def trained(model: Any, batches: list[Batch], precision: str = "amp_bf16") -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of a step."""
    model.zero_grad()
    parts = gradients(model, step_of(batches), Compute(CPU, precision), 0, 0)
    return [part.sums["mlm"] for part in parts], {name: each.grad.clone() for name, each in model.named_parameters()}


@pytest.fixture
def batches() -> list[Batch]:
    return [pack([sequences([40 + number, 20])], row_tokens=80) for number in range(MICROBATCHES)]


@pytest.mark.runs
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_casts_each_matrix_once_and_gives_the_same_bits(
    batches: list[Batch], monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    """Autocast would cast each in every microbatch, and once more where a layer is computed again."""
    model = build(small(num_layers=4), activation_checkpointing=recompute).train()
    matrices = Counter(tuple(each.weight.shape) for each in model.modules() if isinstance(each, Linear))
    assert sum(matrices.values()) == 4 * 4 + 2
    with counted_casts() as once:
        found = trained(model, batches)
    monkeypatch.setattr(making, "cast_once", lambda model, dtype: nullcontext())
    with counted_casts() as again:
        expected = trained(model, batches)
    counted = {shape: once[shape] for shape in matrices}
    assert counted == matrices
    passes = 2 if recompute else 1
    in_layers = sum(again[shape] for shape in matrices) - 2 * MICROBATCHES  # head and decoder
    assert in_layers == 4 * 4 * MICROBATCHES * passes
    assert all(map(torch.equal, found[0], expected[0]))
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


def test_nothing_is_left_of_the_casts(batches: list[Batch]) -> None:
    """Or validation after an update would read the weights before it."""
    model = build(small(num_layers=2)).train()
    trained(model, batches)
    assert all(each.cast is None for each in model.modules() if isinstance(each, Linear))


def test_in_fp32_nothing_is_cast(batches: list[Batch]) -> None:
    model = build(small(num_layers=2)).train()
    with counted_casts() as casts:
        trained(model, batches, "fp32")
    assert not casts


def test_gradients_come_from_the_last_layer_to_the_first(batches: list[Batch]) -> None:
    """In every microbatch; DDP sends them while the layers before are computed. A cast that autograd made before the
    pass would come after all of it."""
    model = build(small(num_layers=4)).train()
    order: list[Any] = []
    for index, layer in enumerate(model.model.layers):
        layer.attn.Wqkv.weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
        layer.mlp_norm.register_full_backward_hook(lambda *_, index=index: order.append(("norm", index)))
    trained(model, batches)
    expected = [event for index in (3, 2, 1, 0) for event in (("norm", index), index)]
    assert order == expected * MICROBATCHES


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_take_the_casts(backend: str, batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    """In as many graphs as without them, and with the same bits."""
    model = build(small(num_layers=2)).train()
    model.compile_layers(backend=backend)
    graphs: list[int] = []

    def step() -> tuple[list[Tensor], dict[str, Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for _ in range(2):
            found = trained(model, [batches[0]] * MICROBATCHES)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return found

    found = step()
    monkeypatch.setattr(making, "cast_once", lambda model, dtype: nullcontext())
    expected = step()
    assert graphs[0] == graphs[1]
    assert all(map(torch.equal, found[0], expected[0]))
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
