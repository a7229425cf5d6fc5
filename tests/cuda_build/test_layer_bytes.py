"""What base's compiled layers read and write for each token, at the recipe's microbatch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_build import null
from tests.cuda_build.tables import compare

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    found: dict[str, Any] = null.run("layer_bytes", "0.1", "0.0", "0.1-bf16")
    return found


def test_bytes_of_each_layer_are_on_record(counted: dict[str, Any]) -> None:
    """By kernel: one that is no longer fused, or a tensor in fp32 where it was in bf16, is lost speed."""
    compare("layer_bytes", counted)


@pytest.mark.parametrize(
    ("dropout", "most"), [("dropout 0.1", 81_000), ("dropout 0.0", 79_000), ("dropout 0.1, residual in bf16", 64_000)]
)
def test_a_layer_of_base_moves_less_than_it_may(counted: dict[str, Any], dropout: str, most: int) -> None:
    """Before the residual was added in the next layer's norm, and rotary positions became one kernel, it was 106 KB."""
    assert all(counted[dropout][kind]["bytes_per_token"] < most for kind in ("first", "local", "global"))


def test_what_stands_outside_the_layers_is_compiled(counted: dict[str, Any]) -> None:
    """Uncompiled it was 75 operations and 265 KB a token with the loss; norms, GELU and casts have no kernel left."""
    outside = counted["dropout 0.1"]["outside"]
    assert not any(word in name for name in outside for word in ("layer_norm", "gelu", "sin", "embedding.default"))
    assert sum(moved for _, moved in outside.values()) < 230_000
    assert sum(launches for name, (launches, _) in outside.items() if name != "compiled") < 50
