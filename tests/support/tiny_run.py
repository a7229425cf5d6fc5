"""A data set of a few kilobytes, and a run that trains on it within seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.make_shards import make_documents, make_shards, make_tokenizer

TinyRun = Callable[..., list[str]]  # of the fixture tiny_run, see tests/conftest.py

# composer and launchers set them
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")

# keys of metrics.jsonl in which two runs that train the same may differ: times, speeds and memory
TIMES = (
    "time", "seconds", "tokens_per_second", "rank_flops_per_second", "data_wait_share", "peak_memory_bytes",
    "seconds_left", "mfu",
)  # fmt: skip

TINY_YAML = """\
name: tiny
runs_folder: {runs}
seed: 5
compute: {{device: cpu}}
data:
  train: {data}/train
  validation: {data}/validation
  tokenizer: {data}/tokenizer
  packing_window: 8
  max_wait_rows: 32
  shuffle_block_shards: 2
  num_workers: 0
model:
  vocab_size: 512
  hidden_size: 32
  num_layers: 4
  num_heads: 2
  intermediate_size: 48
  local_attention: 16
  attention_out_dropout: 0.0
optim:
  name: stable_adamw
  lr: 5e-3
phases:
  short:
    tokens: 4000
    row_tokens: 64
    batch_rows: 8
    microbatch_tokens: 256
    batch_warmup: {{start_rows: 4, step_rows: 4, tokens: 800}}
    schedule: {{warmup_tokens: 500}}
  long:
    tokens: 2000
    row_tokens: 128
    batch_rows: 4
    microbatch_tokens: 256
    model: {{global_rope_theta: 160_000}}
    schedule: {{decay_tokens: 1000}}
checkpoint:
  interval_seconds: null
logging:
  progress_bar: false
"""


def make_tiny_data(folder: Path) -> Path:
    """Write train (60 documents of 3 to 400 tokens in several shards), validation and tokenizer; always the same."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    draw = np.random.default_rng(3)
    lengths = [3, 400, *np.clip(draw.lognormal(3.5, 1.0, 58), 3, 400).astype(int)]
    make_shards(folder / "train", make_documents(tokenizer, lengths, seed=21), tokenizer)
    make_shards(folder / "validation", make_documents(tokenizer, [40, 3, 150, 90, 300], seed=22), tokenizer)
    return folder
