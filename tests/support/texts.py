"""Held-out texts of a run, opened for tests."""

from __future__ import annotations

from modernbert_train.clock import Clock
from modernbert_train.config.schema import RunConfig
from modernbert_train.data.facts import read_facts
from modernbert_train.evaluate.heldout import HeldOutTexts


def texts_of(config: RunConfig) -> HeldOutTexts:
    return HeldOutTexts(config.data, config.eval, Clock.of(config), config.model.vocab_size, read_facts(config.data))
