"""The places of dropout in four encoders: with another place, a published recipe regularises another model.

Random masks cannot be compared, so each dropout multiplies by 0.7 here, and hidden states in training mode must equal
transformers'. Dropout of attention probabilities is not compared, since no encoder here has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.encoders import ENCODERS, build, twin_of, with_dropout

LENGTHS = (37, 20)


def times_0_7(module: nn.Dropout, x: Tensor) -> Tensor:
    """Replaces a Dropout's forward; tensors of 4 dimensions are the probabilities of transformers' XLNet."""
    return 0.7 * x if module.training and x.dim() < 4 else x


@pytest.mark.parametrize("name", ["bert", "albert", "deberta", "deberta, narrow", "xlnet"])
@torch.no_grad()
def test_hidden_states_in_training_mode_equal_transformers(
    name: str, sequences: Callable[..., Any], pack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(with_dropout(ENCODERS[name], 0.1))
    twin = twin_of(model).base_model
    apart = sequences(LENGTHS)
    packed = pack([apart], row_tokens=sum(LENGTHS), predict_every=0).packed
    still = model.encode(packed)
    monkeypatch.setattr(nn.Dropout, "forward", times_0_7)
    model.train()
    for module in twin.modules():  # theirs of probabilities have a separate rate, or are absent here
        if isinstance(module, nn.Dropout):
            module.train()
    hidden_TD, start = model.encode(packed), 0
    assert (hidden_TD - still).abs().max() > 0.1
    for ids in apart:
        expected = twin(input_ids=ids[None])[0][0]
        torch.testing.assert_close(hidden_TD[start : start + len(ids)], expected, atol=1e-5, rtol=1e-5)
        start += len(ids)
