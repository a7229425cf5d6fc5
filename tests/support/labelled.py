"""Small models and labelled texts for fine-tuning."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DebertaConfig,
    DistilBertConfig,
    GemmaConfig,
    LlamaConfig,
    ModelConfig,
    ModernBertConfig,
)
from modernbert_train.config.xlnet import XLNetConfig

SIZE = {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "init_std": 0.4}
MODERNBERT = ModernBertConfig(
    **SIZE, num_layers=3, global_attn_every_n_layers=2, local_attention=16, attention_out_dropout=0.0
)
BERT = BertConfig(**SIZE, num_layers=2, max_positions=64, dropout=0.0)
ROBERTA = BertConfig(**SIZE, num_layers=2, max_positions=64, segments=1, position_offset=1, dropout=0.0)
ALBERT = AlbertConfig(**SIZE, embedding_size=24, num_layers=3, max_positions=64, dropout=0.0)
CONFIGS: dict[str, ModelConfig] = {"modernbert": MODERNBERT, "bert": BERT, "roberta": ROBERTA, "albert": ALBERT}
CONFIGS["distilbert"] = DistilBertConfig(**SIZE, num_layers=2, max_positions=64, dropout=0.0)
CONFIGS["xlnet"] = XLNetConfig(**SIZE, num_layers=2, dropout=0.0)
CONFIGS["deberta"] = DebertaConfig(**SIZE, num_layers=2, max_positions=64, buckets=8, max_distance=16, dropout=0.0)
# encoders with a decoder's architecture: transformers has fewer classes for them
LLAMA = LlamaConfig(**SIZE, num_layers=2, key_value_heads=1)
LLAMAS: dict[str, ModelConfig] = {"llama": LLAMA, "qwen2": replace(LLAMA, qkv_bias=True)}
LLAMAS["qwen3"] = replace(LLAMA, qk_norm=True)
GEMMA = GemmaConfig(**SIZE, num_layers=2, key_value_heads=1, head_width=16, local_attention=16)
GOOD, BAD, PLAIN = ("aki", "beru", "domi"), ("kelo", "lamu", "sitre"), ("nabe", "ruto", "tinda", "mosa", "lebi")


def sentences(number: int, seed: int) -> list[tuple[str, str]]:
    """Return texts and classes: a word of GOOD means up, a word of BAD means down."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        label = draw.choice(("up", "down"))
        words = draw.choices(PLAIN, k=draw.randint(2, 14))
        words.insert(draw.randrange(len(words)), draw.choice(GOOD if label == "up" else BAD))
        found.append((" ".join(words), label))
    return found


def write_tsv(file: Path, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in (head, *rows)), encoding="utf-8")
    return file


WriteTask = Callable[..., Path]


def write_questions(folder: Path, write_task: WriteTask, **keys: object) -> Path:
    """Write a task in SQuAD 2's JSON: the answer is the only word of GOOD or BAD in a context; a third has none."""
    for name, number, seed in (("train", 96, 1), ("dev", 40, 2)):
        asked = []
        for place, (text, _) in enumerate(sentences(number, seed)):
            answers = [word for word in text.split() if word not in PLAIN]
            if place % 3 == 0:
                text, answers = " ".join(word for word in text.split() if word in PLAIN), []
            found = [{"text": word, "answer_start": f" {text} ".index(f" {word} ")} for word in answers]
            about = {"id": f"{name}-{place}", "question": "ruto?", "answers": found, "is_impossible": not found}
            asked.append({"context": text, "qas": [about]})
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": asked}]}))
    files = {"train": f"{folder}/train.json", "validation": {"dev": f"{folder}/dev.json"}}
    usual = {
        "kind": "question-answering",
        "unanswerable": True,
        "overlap_tokens": 4,
        "id_column": "id",
        "max_tokens": 16,
    }
    return write_task(**files | usual | keys)


def write_choices(folder: Path, write_task: WriteTask, **keys: object) -> Path:
    """Write a task in HellaSwag's form, of two or three choices: the right one has a word of GOOD, others of BAD."""
    for name, number, seed in (("train", 96, 1), ("dev", 40, 2)):
        draw, lines = random.Random(seed), []
        for _ in range(number):
            choices = [" ".join((draw.choice(PLAIN), draw.choice(BAD))) for _ in range(draw.choice((2, 3)))]
            right = draw.randrange(len(choices))
            choices[right] = " ".join((draw.choice(PLAIN), draw.choice(GOOD)))
            lines.append({"ctx": " ".join(draw.choices(PLAIN, k=4)), "endings": choices, "label": str(right)})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"train": f"{folder}/train.jsonl", "validation": {"dev": f"{folder}/dev.jsonl"}}
    usual = {"kind": "multiple-choice", "text_columns": ["ctx"], "choice_columns": ["endings"], "max_tokens": 32}
    return write_task(**files | usual | keys)
