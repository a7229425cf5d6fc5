"""Number of graphs that a whole run compiles: each graph of a real layer takes some ten seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_build import null

pytestmark = [pytest.mark.runs, pytest.mark.timeout(1200)]

TRAINED, VALIDATED = 8, 7  # three kinds of layers, embedding, rotary tables, final norm, head; in training the loss


def test_a_run_compiles_once_for_each_shape_and_never_again(tmp_path: Path) -> None:
    """Batch warmup, two phases, validation. Neither documents nor steps may require another graph."""
    calls = null.run("recompiles", str(tmp_path))
    seen: dict[tuple[bool, int, int], int] = {}
    for number, call in enumerate(calls):
        shape = (call["trains"], call["tokens"], call["predicted"])
        most = 0 if shape in seen else TRAINED if call["trains"] else VALIDATED
        assert call["graphs"] <= most, (number, call)
        seen[shape] = seen.get(shape, 0) + 1
    trained = [shape for shape in seen if shape[0]]
    assert len(trained) == 2 and len(seen) - len(trained) <= 4, "a shape for each phase, and the last of a validation"
    assert sum(call["graphs"] for call in calls) <= TRAINED * len(trained) + VALIDATED * (len(seen) - len(trained))
    assert all(seen[shape] > 2 for shape in trained) and len({call["longest"] for call in calls}) > 1
