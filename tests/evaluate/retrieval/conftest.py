"""A toy set for retrieval: words with synonyms that only training reveals; and a tiny encoder."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from tests.support.beir import WriteBeir, make_encoder, words_about, write_lines
from tests.support.make_shards import make_tokenizer


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


@pytest.fixture
def write_beir(tmp_path: Path) -> WriteBeir:
    """Return a function that writes a BEIR folder: corpus and queries by id, judgements by split."""

    def write(
        corpus: Mapping[str, str],
        queries: Mapping[str, str],
        name: str = "beir",
        **qrels: Iterable[tuple[object, object, object]],
    ) -> Path:
        folder = tmp_path / name
        (folder / "qrels").mkdir(parents=True)
        write_lines(folder / "corpus.jsonl", ({"_id": key, "title": "", "text": text} for key, text in corpus.items()))
        write_lines(folder / "queries.jsonl", ({"_id": key, "text": text} for key, text in queries.items()))
        for split, lines in qrels.items():
            rows = [("query-id", "corpus-id", "score"), *lines]
            text = "".join("\t".join(map(str, row)) + "\n" for row in rows)
            (folder / "qrels" / f"{split}.tsv").write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def toy(write_beir: WriteBeir) -> Path:
    """Write twenty queries, each with one text of their synonyms; `train` has other queries than `test`."""
    pairs = {str(seed): words_about(seed, 4) for seed in range(120)}
    train = [(key, f"d{key}", 1) for key in pairs if int(key) >= 20]
    test = [(key, f"d{key}", 1) for key in pairs if int(key) < 20]
    corpus = {f"d{key}": text for key, (_, text) in pairs.items()}
    return write_beir(corpus, {key: query for key, (query, _) in pairs.items()}, name="toy", train=train, test=test)
