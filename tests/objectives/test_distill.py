"""The divisors of distillation's loss terms. A wrong one scales a loss by the padding of a batch."""

from __future__ import annotations

from modernbert_train.config.schema import DistillConfig
from modernbert_train.objectives import build_objective
from tests.support.mlm_lines import VOCABULARY, text_of


def test_hidden_states_are_compared_at_tokens_and_not_at_pads() -> None:
    text = text_of([30, 12, 1], tail=17)
    settings = DistillConfig(teacher="runs/teacher", mse_weight=1.0, cosine_weight=1.0, pooled_weight=1.0)
    made = build_objective(settings, VOCABULARY).make(text, settings)
    tokens = 30 + 12 + 1 + 3 * settings.special_tokens
    assert len(text.ids_T) == tokens + 17
    assert made.counts["cosine"] == made.counts["mse"] == tokens and made.counts["pooled"] == 3
    assert made.counts["kl"] == made.counts["mlm"] > 0
