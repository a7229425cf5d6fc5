"""Fixtures of runs on pairs; and plain text for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.contrastive_fixtures import contrastive_run, pairs
from tests.support.contrastive_scores import scored
from tests.support.front_door import cli
from tests.support.make_shards import make_documents, make_shards

__all__ = ["cli", "contrastive_run", "pairs", "scored"]


@pytest.fixture(scope="session")
def text(pairs: Path) -> Path:
    """Shards of plain text by the same tokenizer."""
    tokenizer = pairs / "shards/tokenizer"
    documents = make_documents(tokenizer, [40 + 7 * (number % 20) for number in range(120)], seed=3)
    make_shards(pairs / "text", documents, tokenizer)
    return pairs / "text"
