"""Memory traffic of base's compiled layers per token, at the recipe's microbatch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_build import null
from tests.cuda_build.tables import compare

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    found: dict[str, Any] = null.run("layer_bytes", "0.1", "0.0", "0.1-bf16", "0.1-tiles")
    return found


def test_bytes_of_each_layer_are_on_record(counted: dict[str, Any]) -> None:
    """By kernel: a lost fusion, or a tensor in fp32 instead of bf16, is lost speed."""
    compare("layer_bytes", counted)


@pytest.mark.parametrize(
    ("dropout", "most"), [("dropout 0.1", 81_000), ("dropout 0.0", 79_000), ("dropout 0.1, residual in bf16", 64_000)]
)
def test_a_layer_of_base_moves_less_than_it_may(counted: dict[str, Any], dropout: str, most: int) -> None:
    """It was 106 KB before the residual was added in the next layer's norm, and rotary positions became one kernel."""
    assert all(counted[dropout][kind]["bytes_per_token"] < most for kind in ("first", "local", "global"))


def test_what_stands_outside_the_layers_is_compiled(counted: dict[str, Any]) -> None:
    """Eager, it was 75 operations and 265 KB a token with the loss; now norms, GELU and casts are all fused."""
    outside = counted["dropout 0.1"]["outside"]
    assert not any(word in name for name in outside for word in ("layer_norm", "gelu", "sin", "embedding.default"))
    assert sum(moved for _, moved in outside.values()) < 230_000
    assert sum(launches for name, (launches, _) in outside.items() if name != "compiled") < 50


def test_rotary_positions_of_local_layers_cost_no_pass_of_their_own(counted: dict[str, Any]) -> None:
    """The tile kernels rotate, and write dq, dk and dv where the next product reads them; no other kernel does."""
    apart, within = (counted[each]["local"] for each in ("dropout 0.1", "dropout 0.1, tiles"))
    kernels = [name for way in ("forward", "backward") for name in within[way]]
    assert not any("flip" in name or "cat" in name or "stack" in name for name in kernels)
    assert within["bytes_per_token"] == apart["bytes_per_token"] - 17_280
    assert within["attention"].keys() == {"_forward", "_backward"}
    assert counted["dropout 0.1, tiles"]["global"] == counted["dropout 0.1"]["global"]
