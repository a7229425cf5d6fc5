"""A small retrieval data set, and encoders for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modernbert_train.config.schema import ModelConfig, ModernBertConfig
from modernbert_train.evaluate.retrieval.beir import read_beir
from tests.support.labelled import BERT as BERT
from tests.support.labelled import SIZE, export_masked_lm, json_lines
from tests.support.pairs import TWINS, WORDS

MODERNBERT = ModernBertConfig(**SIZE, num_layers=2, local_attention=16, attention_out_dropout=0.0)
LONGEST = 64


def words_about(seed: int, size: int) -> tuple[str, str]:
    """Return a query, and a text with the synonyms of its words among others."""
    draw = random.Random(seed)
    words = draw.sample(WORDS, size)
    text = [TWINS[word] for word in words] + draw.choices(list(TWINS.values()), k=2)
    draw.shuffle(text)
    return " ".join(words), " ".join(text)


def make_encoder(out: Path, tokenizer: Path, config: ModelConfig = MODERNBERT, init_std: float = 0.4) -> Path:
    return export_masked_lm(replace(config, init_std=init_std), tokenizer, out, max_tokens=LONGEST)


def write_lines(file: Path, entries: Iterable[Mapping[str, object]]) -> Path:
    file.write_text(json_lines(entries), encoding="utf-8")
    return file


WriteBeir = Callable[..., Path]


def recipe(folder: Path, beir: Path, **keys: Any) -> str:
    """Write a recipe of `retrieval train` for a BEIR folder, which is also measured."""
    settings = {
        "train": [str(beir)], "evaluate": {"toy": str(beir)}, "runs_folder": str(folder / "runs"), "device": "cpu",
        "batch_size": 20, "epochs": 5, "lr": 5e-3, "warmup": 0.1,
    }  # fmt: skip
    file = folder / "toy.yaml"
    file.write_text(json.dumps(settings | keys), encoding="utf-8")
    return str(file)


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def trec_eval(qrels: Mapping[str, Mapping[str, int]], scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of documents with these scores, by query."""
    import pytrec_eval

    names = {"ndcg_at_10": "ndcg_cut_10", "recall_at_100": "recall_100", "map_at_10": "map_cut_10"}
    judge = pytrec_eval.RelevanceEvaluator(dict(qrels), {"ndcg_cut.10", "recall.100", "map_cut.10"})
    found = list(judge.evaluate(scores).values())
    return {ours: sum(each[theirs] for each in found) / len(qrels) for ours, theirs in names.items()}


def figures_of(folder: Path, score: Callable[[str, Sequence[str]], Iterable[float]]) -> dict[str, float]:
    """Return the figures on the split `test` of a set, by a function that scores all texts for a query."""
    beir = read_beir(folder, "test")
    (texts,) = beir.texts(1 << 20)
    scores = {
        query: dict(zip(beir.document_ids, map(float, score(beir.queries[query], texts)), strict=True))
        for query in beir.qrels
    }
    return trec_eval(beir.qrels, scores)


def flip_last_bit(file: Path) -> None:
    saved = file.read_bytes()
    file.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
