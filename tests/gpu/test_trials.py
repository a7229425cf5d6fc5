"""`doctor`'s trials, on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

from modernbert_train.plan.trials import attempt, command_of
from modernbert_train.plan.trials.trials_table import TRIALS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", TRIALS)
def test_what_does_not_refuse_a_gpu_is_usable(name: str) -> None:
    """A user of this GPU would read that a kernel of ours fails."""
    if (reason := TRIALS[name].refusal()) is not None:
        pytest.skip(reason)
    outcome = attempt(command_of(name), TRIALS[name].seconds)
    assert outcome.usable, outcome.text
