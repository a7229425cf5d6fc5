"""A toy set for retrieval: words with synonyms that only training reveals; and a tiny encoder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modernbert_train.config.schema import BertConfig, MaskedLmConfig, ModelConfig, ModernBertConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.hf_folder import export
from tests.data.make_shards import make_tokenizer

SIZE = {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "init_std": 0.4}
MODERNBERT = ModernBertConfig(**SIZE, num_layers=2, local_attention=16, attention_out_dropout=0.0)
BERT = BertConfig(**SIZE, num_layers=2, max_positions=64, dropout=0.0)
LONGEST = 64

_draw = random.Random(7)
WORDS = ["".join(_draw.choices("aeiou", k=1)) + "".join(_draw.choices("bdklmnrst", k=2)) for _ in range(60)]
TWINS = {word: "".join(_draw.choices("xzvwyq", k=3)) for word in WORDS}


def words_about(seed: int, size: int) -> tuple[str, str]:
    """Return a query, and a text with the synonyms of its words among others."""
    draw = random.Random(seed)
    words = draw.sample(WORDS, size)
    text = [TWINS[word] for word in words] + draw.choices(list(TWINS.values()), k=2)
    draw.shuffle(text)
    return " ".join(words), " ".join(text)


def make_encoder(out: Path, tokenizer: Path, config: ModelConfig = MODERNBERT, init_std: float = 0.4) -> Path:
    config = replace(config, init_std=init_std)
    model = build_model(config, MaskedLmConfig())
    initialize(model, config, 3)
    state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight"}
    export(state, config, max_tokens=LONGEST, tokenizer_folder=tokenizer, out=out, card="")
    return out


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


def write_lines(file: Path, entries: Iterable[Mapping[str, object]]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return file


WriteBeir = Callable[..., Path]


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
