"""Fixtures of the data path: a mixture of three streams of a few kilobytes, and a run on one or three."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.config.schema import RunConfig
from tests.support.make_shards import make_documents, make_shards
from tests.support.tiny_run import TinyRun


@pytest.fixture(scope="session")
def three_streams(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for `tiny_run`: books with long documents, mails with short ones, and web, which is only in `short`.

    The second phase has other shares as well as longer rows. Shared by the whole session.
    """
    folder = tmp_path_factory.mktemp("three_streams")
    draw = np.random.default_rng(4)
    lengths = {
        "web": np.clip(draw.lognormal(3.5, 1.0, 30), 3, 400).astype(int).tolist(),
        "books": [700, 900],
        "mails": draw.integers(1, 20, 40).tolist(),
    }
    for seed, (name, each) in enumerate(lengths.items(), start=31):
        documents = make_documents(tiny_data / "tokenizer", each, seed=seed)
        make_shards(folder / name, documents, tiny_data / "tokenizer", shard_bytes=1 << 9)
    return [
        "data.train=null",
        f"data.streams.web={{path: {folder}/web, proportion: 0.5}}",
        f"data.streams.books={{path: {folder}/books, proportion: 0.2}}",
        f"data.streams.mails={{path: {folder}/mails, proportion: 0.3}}",
        "phases.long.streams={books: {proportion: 0.9}, mails: {proportion: 0.1}}",
    ]


@pytest.fixture(params=["one stream", "three streams"])
def config(request: pytest.FixtureRequest, tiny_run: TinyRun, three_streams: list[str]) -> RunConfig:
    cut = [f"phases.{phase}.microbatch_tokens=128" for phase in ("short", "long")]  # several in each rank's share
    return read_run(tiny_run(*cut, *(three_streams if request.param == "three streams" else [])))
