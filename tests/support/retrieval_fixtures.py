"""Fixtures: a toy set for retrieval, of words with synonyms that only training reveals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.beir import WriteBeir, words_about, write_lines


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
