"""Python's garbage collection during a run: it examines few objects."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from modernbert_train.__main__ import main
from tests.support.tiny_run import TinyRun


@pytest.mark.slow
def test_a_collection_looks_at_a_step_and_not_at_the_program(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examining half a million objects takes half a second, while all ranks wait. Cycles created in steps are still
    collected."""
    from composer import Callback

    looked_at = []

    class Steps(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            looked_at.append(len(gc.get_objects()))

    from modernbert_train.train import session

    gc.freeze()  # as the command does behind its imports
    monkeypatch.setattr(session, "build_callbacks", lambda *given: [Steps()])
    main(["train", *tiny_run("phases.long=null")])
    assert len(looked_at) > 6
    assert max(looked_at) < 200_000 and max(looked_at[1:]) < looked_at[0] / 3
    assert looked_at[-1] < 2 * looked_at[1] + 10_000
    assert gc.get_freeze_count() == 0
