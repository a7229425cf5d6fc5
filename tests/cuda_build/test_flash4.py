"""The real FlashAttention-4, compiled for Hopper without a GPU, and called from compiled layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_build import flash4, null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if (reason := flash4.find()) is not None:
        pytest.skip(reason)
    found: dict[str, Any] = null.run("flash4", str(tmp_path_factory.mktemp("cubins")))
    return found


def test_compiled_layers_stay_whole(looked_at: dict[str, Any]) -> None:
    """No graph break, and no recompilation for other documents or another phase."""
    found = looked_at["layers"]
    assert found["graph_breaks"] == 0
    # four kinds of layers; embedding, final norm, head and loss
    assert found["graphs"] == found["graphs_after_other_documents_and_phase"] == 8
    assert found["waits"] == 0 and found["faults"] == []
    assert found["kernel"] == "flash (FlashAttention-4)"


def test_a_run_goes_through(looked_at: dict[str, Any]) -> None:
    """From the configuration to the last checkpoint, compiled."""
    assert looked_at["run"] == {"outcome": "done", "faults": [], "graph_breaks": 0}


def test_a_run_ends_before_its_first_step_where_gradients_are_wrong(looked_at: dict[str, Any]) -> None:
    """The null device computes nothing, so all gradients are wrong."""
    message = looked_at["unproven"]
    assert message.startswith("FlashAttention-4 (flash-attn-4 4.0.0")
    assert "with heads of 64 in bfloat16, computes something else than attention: relative errors of " in message
    assert "Set compute.attention=varlen" in message


def test_layers_give_it_their_windows_and_boundaries(looked_at: dict[str, Any]) -> None:
    """None for an unlimited side: in its code -1 next to a limit means a window without tokens."""
    calls = looked_at["calls_of_layers"]
    for function in ("forward", "backward"):
        mine = [call for call in calls if call["function"] == function]
        windows = [(call["window_size_left"], call["window_size_right"]) for call in mine]
        assert set(windows) == {(None, None), (64, 64)} and len(windows) % 4 == 0  # four layers a batch
        assert {call["sequences"] for call in mine} == {63, 127, 191}  # as padded by layers.batch_of
        assert {call["max_seqlen_q"] for call in mine} == {1024, 1000, 596}


def test_its_kernels_compile_for_hopper(looked_at: dict[str, Any]) -> None:
    """Forward and backward: global and local, deterministic too, causal, and with the table for many sequences."""
    asked = [
        (each["window_size_left"], each["window_size_right"], each.get("deterministic")) for each in looked_at["calls"]
    ]
    assert asked == [
        *((None, None, None), (None, None, True)),
        *((64, 64, None), (64, 64, True)),
        *((None, 0, None), (None, 0, False)),
        *((63, 0, None), (63, 0, True)),
        *((None, None, None), (None, None, False)),
    ]
    # global, local, causal, many sequences; the backward pass of the first two deterministic too. A causal window
    # counts as a window a window
    assert looked_at["compiled"] == [4, 6]
    # fewer files than kernels: kernels with similar arguments share a file name
    assert len(looked_at["for_hopper"]) >= 4 and all(looked_at["for_hopper"])
