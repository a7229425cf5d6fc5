"""Fixtures of retrieval: a toy set, and a tiny encoder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.beir import make_encoder, words_about
from tests.support.make_shards import make_tokenizer
from tests.support.retrieval_fixtures import toy, write_beir

__all__ = ["encoder", "one_thread", "tokenizer", "toy", "write_beir"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [" ".join(words_about(seed, 6)) for seed in range(200)]
    texts += ["".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz ", k=4000))]
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer", texts)


@pytest.fixture(scope="session")
def encoder(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a ModernBERT with random weights, small enough to learn."""
    return make_encoder(tmp_path_factory.mktemp("encoder") / "encoder", tokenizer, init_std=0.1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
