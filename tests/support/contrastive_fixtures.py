"""Fixtures: pairs of words and their twins, as shards; and a run on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.make_shards import make_tokenizer
from tests.support.pairs import MODEL, ContrastiveRun, Row, as_source, make_rows, prepare_pairs, write_rows


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 triples as shards, a tenth held out, with their tokenizer and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = make_rows(240)
    texts = [text for row in rows for text in (row["query"], row["positive"], *row["negative"])]
    texts.append("".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=4000)))
    make_tokenizer(folder / "tokenizer", texts)
    write_rows(folder / "pairs.jsonl", rows)
    asked = (folder / "shards", as_source(folder / "pairs.jsonl"), folder / "tokenizer", "validation_share=0.1")
    assert prepare_pairs(*asked, negatives=["negative"], max_tokens=64) == 0
    return folder


RUN_YAML = """\
name: pairs
runs_folder: {runs}
data:
  tokenizer: {shards}/tokenizer
  train: {shards}/train
  validation: {shards}/validation
  num_workers: 0
model: {model}
objective: {{name: contrastive}}
optim: {{name: stable_adamw, lr: 0.002}}
compute: {{device: cpu, precision: fp32}}
phases:
  main:
    tokens: 16_000
    row_tokens: 256
    batch_rows: 8
    microbatch_tokens: 512
    schedule: {{warmup_tokens: 2000}}
"""


@pytest.fixture
def contrastive_run(pairs: Path, tmp_path: Path) -> ContrastiveRun:
    """The command line of a run on them: contrastive_run("key=value") -> [path of a YAML, override]."""

    def words(*overrides: str, model: Row = MODEL) -> list[str]:
        file = tmp_path / "pairs.yaml"
        text = RUN_YAML.format(runs=tmp_path / "runs", shards=pairs / "shards", model=json.dumps(model))
        file.write_text(text, encoding="utf-8")
        return [str(file), *overrides]

    return words
