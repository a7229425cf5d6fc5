"""The benchmark of training steps, at a tiny size. If it lies, so does every number that we publish from it."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks.contenders import _documents
from benchmarks.corpus import write_corpus
from benchmarks.train_step import Case, report, run, run_config
from modernbert_train.batch import IGNORED_LABEL
from modernbert_train.config.schema import ModernBertConfig
from modernbert_train.data.facts import read_facts
from modernbert_train.train.build import build_data

TINY = Case(
    ModernBertConfig(
        vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=8, attention_out_dropout=0.0
    ),
    row_tokens=128,
    microbatch_tokens=256,
    batch_tokens=512,
    rounds=2,
    steps=3,
    warm_up=1,
    reference_documents=3,
    median_tokens=40,
)


@pytest.mark.slow
def test_every_contender_trains_on_the_same_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run itself refuses contenders whose first losses differ; here it must pass, and measure every part."""
    write_corpus(tmp_path, 64, tokens=4000, median_tokens=40, longest=300)
    contenders = run(TINY, torch.device("cpu"), tmp_path, workers=0)
    names = ["ours", "ours, through train", "transformers, padded", "transformers, padded, sparse"]
    assert list(contenders) == names
    for name, contender in contenders.items():
        assert len(contender.rates) == len(contender.flop_rates) == 2 and min(contender.rates) > 0
        through = ["data wait", "host between update and forward", "all"]
        parts = {"ours": ["data wait", "forward", "backward", "optimizer"], names[1]: through}
        assert list(contender.seconds) == parts.get(name, ["forward", "backward", "optimizer"])
    assert [len(times) for times in contenders["ours"].seconds.values()] == [6] * 4
    # FLOPs of a token, about that of the model on documents of some 40 tokens, whoever computes them
    per_token = [median(each.flop_rates) / median(each.rates) for each in contenders.values()]
    assert max(per_token) < 1.2 * min(per_token)

    lines = report("tiny", TINY, contenders, {"of matmul": 1e12})
    assert [line["contender"] for line in lines] == names
    assert lines[0]["ours_is"] == 1.0 and lines[2]["ours_is"] > 0
    assert "rows of 128, microbatches of 256, steps of 512 tokens" in capsys.readouterr().out


def test_transformers_gets_the_documents_that_we_pack(tmp_path: Path) -> None:
    """If it got other tokens or labels, or rows with their tails, the comparison would be of different work."""
    write_corpus(tmp_path, 64, tokens=4000, median_tokens=40, longest=300)
    config = run_config(TINY, tmp_path, tmp_path, torch.device("cpu"), workers=0)
    batch = next(iter(build_data(config, read_facts(config.data)).loader(0, 1)))
    documents = list(_documents(batch))
    assert [len(ids) for ids, _ in documents] == [chunk.length + 2 for row in batch.rows for chunk in row]
    assert sum(len(ids) for ids, _ in documents) == sum(part.num_tokens for part in batch.microbatches)
    predicted = sum(int((labels != IGNORED_LABEL).sum()) for _, labels in documents)
    assert predicted == sum(part.counts["mlm"] for part in batch.microbatches) > 0
    assert all(int(ids[0]) == 1 and int(ids[-1]) == 2 for ids, _ in documents)  # [CLS] and [SEP] are never predicted
