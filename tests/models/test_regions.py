"""The regions outside the layers: compiled unchanged, with torch's own kernels for gradients of rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from benchmarks.batches import mean_loss
from modernbert_train.models.lookup import Embedding, take_rows
from tests.support.encoder_training import pack, sequences, small
from tests.support.encoders import build


def recorded(targets: list[str]) -> Any:
    """A backend that runs graphs as they are and notes the operators of backward passes."""

    def backward(graph: Any, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    return aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_rows_are_made_by_torchs_own_kernels(dtype: torch.dtype) -> None:
    """Rows that are read often, and positions that repeat: eager and compiled give the same bits."""
    torch._dynamo.reset()
    ids_T, positions_M = torch.tensor([3, 1, 3, 3, 0, 3]), torch.tensor([2, 5, 0, 0])
    drawn = torch.Generator().manual_seed(0)
    table = Embedding(7, 4, dtype=dtype)

    def rows(x_TD: Tensor) -> Tensor:
        return take_rows(table(ids_T) * x_TD, positions_M).float().square().sum()

    targets: list[str] = []
    x_TD = torch.randn(6, 4, generator=drawn).to(dtype)
    found = []
    for call in (rows, torch.compile(rows, dynamic=False, backend=recorded(targets))):
        table.zero_grad()
        x = x_TD.clone().requires_grad_()
        loss = call(x)
        loss.backward()
        found.append((loss.detach(), x.grad, table.weight.grad))
    assert all(map(torch.equal, *found))
    assert any("table_gradient" in target for target in targets)
    assert any("rows_gradient" in target for target in targets)
    assert not any("index_put" in target or "embedding_dense_backward" in target for target in targets)


@pytest.mark.runs
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    """The compiled functions take the module as an argument: bound to it, a copy would read the first one's weights."""
    torch._dynamo.reset()
    batch = pack([sequences([30, 20])], row_tokens=60)
    model = build(small(num_layers=1))
    model.compile_layers(backend="eager")
    before = mean_loss(model, batch).item()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert mean_loss(other, batch).item() == before != mean_loss(model, batch).item()


@pytest.mark.parametrize("search", [True, False])
def test_search_reaches_the_compiler(search: bool) -> None:
    with torch._inductor.config.patch(coordinate_descent_tuning=not search):
        build(small(num_layers=1), search=search).compile_layers(backend="eager")
        assert torch._inductor.config.coordinate_descent_tuning is search
