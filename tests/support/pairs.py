"""Pairs of texts, and runs that train on them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from data_prep.prepare import main as prepare
from modernbert_train.data.dataset_card import read_card
from modernbert_train.data.mds import TokenShards

Row = dict[str, Any]
MODEL = {
    "name": "modernbert", "vocab_size": 512, "hidden_size": 32, "num_layers": 3, "num_heads": 2,
    "global_attn_every_n_layers": 2, "intermediate_size": 48, "local_attention": 16, "init_std": 0.1,
    "attention_out_dropout": 0.0,
}  # fmt: skip
_draw = random.Random(7)
WORDS = ["".join(_draw.choices("aeiou", k=1)) + "".join(_draw.choices("bdklmnrst", k=2)) for _ in range(60)]
TWINS = {word: "".join(_draw.choices("xzvwyq", k=3)) for word in WORDS}


def make_rows(number: int, negatives: int = 1) -> list[Row]:
    """Queries of three to eight words, a text of their twins, and texts of others."""
    rows = []
    for seed in range(number):
        draw = random.Random(seed)
        words = draw.sample(WORDS, draw.randint(3, 8))
        others = [" ".join(draw.choices([*TWINS.values()], k=draw.randint(4, 9))) for _ in range(negatives)]
        rows.append(
            {
                "query": f"{seed} " + " ".join(words),
                "positive": f"{seed} " + " ".join(TWINS[word] for word in words),
                "negative": others,
            }
        )
    return rows


def prepare_pairs(out: Path, source: Row, tokenizer: Path, *keys: str, **pairs: Any) -> int:
    """Prepare one source of pairs by a spec, whose section `pairs` is given; returns the exit code."""
    spec = {"out": str(out), "sources": {"mine": source}, "pairs": pairs, "tokenizer": {"path": str(tokenizer)}}
    file = out.with_name(f"{out.name}.yaml")
    file.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return prepare([str(file), *keys])


def as_source(file: Path) -> Row:
    return {"kind": file.suffix[1:], "path": str(file)}


def write_rows(file: Path, rows: list[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


ContrastiveRun = Callable[..., list[str]]


def masked_first(words: list[str], text: Path) -> list[str]:
    """The same run with a phase of masked tokens of another stream before it, which ends amid a batch of text."""
    file = Path(words[0])
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    own = tree["data"].pop("train")
    tree["data"]["streams"] = {"text": {"path": str(text)}, "pairs": {"path": own}}
    tree["objective"]["mlm_head"] = True
    main = tree["phases"]["main"]
    masked = {**main, "tokens": 8000, "objective": {"name": "mlm"}, "schedule": {"warmup_tokens": 1000}}
    tree["phases"] = {
        "masked": {**masked, "streams": {"text": {"proportion": 1.0}, "pairs": {"proportion": 0.0}}},
        "main": {**main, "streams": {"text": {"proportion": 0.0}, "pairs": {"proportion": 1.0}}},
    }
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return words


def documents(folder: Path) -> list[list[int]]:
    card = read_card(folder)
    shards = TokenShards(folder, card.column, card.vocab_size, 1, card=card)
    return [shards.read(number).tolist() for number in range(card.documents)]
