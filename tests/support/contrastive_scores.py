"""Scores of a teacher for pairs of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pairs import ContrastiveRun, as_source, make_rows, prepare_pairs, write_rows


def scored_rows() -> list[dict[str, Any]]:
    """Two negatives of most queries, one of each fifth; scores from -5 to 5."""
    rows = make_rows(90, negatives=2)
    for number, row in enumerate(rows):
        row["negative"] = row["negative"][: 1 if number % 5 == 0 else 2]
        row["right"] = 5 - number % 7
        row["wrong"] = [number % 5 - 5 + place for place in range(len(row["negative"]))]
    return rows


@pytest.fixture
def scored(pairs: Path, tmp_path: Path, contrastive_run: ContrastiveRun) -> list[str]:
    """The command line of a run on pairs with scores."""
    source = as_source(write_rows(tmp_path / "s.jsonl", scored_rows()))
    texts = {"negatives": ["negative"], "max_negatives": 2, "max_tokens": 64}
    texts |= {"scores": ["right", "wrong"], "score_range": [-5, 5]}
    asked = (tmp_path / "scored", source, pairs / "tokenizer", "validation_share=0")
    assert prepare_pairs(*asked, **texts) == 0
    return contrastive_run(
        f"data.train={tmp_path / 'scored/train'}", "data.validation=null", "objective.score_weight=2"
    )
