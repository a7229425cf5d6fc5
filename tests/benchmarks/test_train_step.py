"""The benchmark of training steps, at a tiny size. If it lies, so does every number that we publish from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.documents import ROW_TOKENS, draw_rows, pack, training_flops
from benchmarks.train_step import Preset, run
from modernbert_train.config.schema import ModelConfig

LARGE = ModelConfig(hidden_size=1024, num_layers=28, num_heads=16, intermediate_size=2624)


def test_every_contender_trains_on_the_same_documents() -> None:
    """The run itself refuses contenders whose first losses differ; here it must pass, and measure every part."""
    tiny = ModelConfig(
        vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=8, attention_out_dropout=0.0
    )
    contenders, flops = run(
        Preset(tiny, rows=2, microbatch_rows=1, microbatch_documents=3, rounds=2), torch.device("cpu")
    )
    assert list(contenders) == ["ours", "transformers, padded", "transformers, padded, sparse"]
    for contender in contenders.values():
        assert len(contender.rates) == 2 and min(contender.rates) > 0
        assert list(contender.seconds) == ["forward", "backward", "optimizer"]
    assert len(flops) == 2


def test_rows_hold_whole_documents_and_every_label() -> None:
    """Padding counted as tokens, or labels lost in packing, would flatter us."""
    rows = draw_rows(np.random.default_rng(1), 3, 500)
    batch = pack(rows)
    documents = [document for row in rows for document in row]
    assert len(rows) == 3 and len(batch.input_ids_T) == 3 * ROW_TOKENS
    assert batch.num_tokens == sum(len(document) for document in documents) == int((batch.input_ids_T != 0).sum())
    assert batch.num_predicted == sum(document.num_predicted for document in documents)
    assert batch.num_predicted == pytest.approx(0.3 * batch.num_tokens, rel=0.02)
    sizes = [n for n in batch.cu_seqlens_S.diff().tolist() if n]
    assert [n for n in map(len, documents) if n not in sizes] == [] and sum(sizes) == 3 * ROW_TOKENS


@pytest.mark.parametrize(
    ("config", "length", "gigaflops"),
    [(ModelConfig(), 1024, 0.8241), (ModelConfig(), 8192, 1.3530), (LARGE, 1024, 2.3071), (LARGE, 8192, 3.1887)],
)
def test_flops_are_those_worked_by_hand(config: ModelConfig, length: int, gigaflops: float) -> None:
    """Utilisation is only comparable if the work is counted as others count it: per token, 30 % of it predicted."""
    flops = training_flops(config, [length] * 10, 3 * length)
    assert flops / (10 * length) / 1e9 == pytest.approx(gigaflops, abs=6e-5)
