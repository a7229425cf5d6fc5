"""Small models and labelled texts for fine-tuning."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modernbert_train.config.schema import (
    AlbertConfig,
    BertConfig,
    DebertaConfig,
    DistilBertConfig,
    GemmaConfig,
    LlamaConfig,
    MaskedLmConfig,
    ModelConfig,
    ModernBertConfig,
)
from modernbert_train.config.xlnet import XLNetConfig
from modernbert_train.models.build import build_model
from modernbert_train.models.init import initialize
from modernbert_train.weights.hf_folder import export

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


def json_lines(rows: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_splits(folder: Path, end: str, train: str, dev: str | None = None) -> dict[str, Any]:
    """Write both files of a task, with the same text if dev is None; return the keys that name them."""
    for name, text in (("train", train), ("dev", train if dev is None else dev)):
        (folder / f"{name}.{end}").write_text(text, encoding="utf-8")
    return {"train": f"{folder}/train.{end}", "validation": {"dev": f"{folder}/dev.{end}"}}


WriteTask = Callable[..., Path]


def write_questions(folder: Path, write_task: WriteTask, **keys: object) -> Path:
    """Write a task in SQuAD 2's JSON: the answer is the only word of GOOD or BAD in a context; a third has none."""

    def written(name: str, number: int, seed: int) -> str:
        asked = []
        for place, (text, _) in enumerate(sentences(number, seed)):
            answers = [word for word in text.split() if word not in PLAIN]
            if place % 3 == 0:
                text, answers = " ".join(word for word in text.split() if word in PLAIN), []
            found = [{"text": word, "answer_start": f" {text} ".index(f" {word} ")} for word in answers]
            about = {"id": f"{name}-{place}", "question": "ruto?", "answers": found, "is_impossible": not found}
            asked.append({"context": text, "qas": [about]})
        return json.dumps({"data": [{"paragraphs": asked}]})

    usual = {"kind": "question-answering", "unanswerable": True, "overlap_tokens": 4, "id_column": "id"}
    files = write_splits(folder, "json", written("train", 96, 1), written("dev", 40, 2))
    return write_task(**files | usual | {"max_tokens": 16} | keys)


def write_choices(folder: Path, write_task: WriteTask, **keys: object) -> Path:
    """Write a task in HellaSwag's form, of two or three choices: the right one has a word of GOOD, others of BAD."""

    def written(number: int, seed: int) -> str:
        draw, lines = random.Random(seed), []
        for _ in range(number):
            choices = [" ".join((draw.choice(PLAIN), draw.choice(BAD))) for _ in range(draw.choice((2, 3)))]
            right = draw.randrange(len(choices))
            choices[right] = " ".join((draw.choice(PLAIN), draw.choice(GOOD)))
            lines.append({"ctx": " ".join(draw.choices(PLAIN, k=4)), "endings": choices, "label": str(right)})
        return json_lines(lines)

    usual = {"kind": "multiple-choice", "text_columns": ["ctx"], "choice_columns": ["endings"], "max_tokens": 32}
    return write_task(**write_splits(folder, "jsonl", written(96, 1), written(40, 2)) | usual | keys)


def squad2(told: Sequence[str], rights: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the figures of SQuAD 2's own evaluation, which transformers has, by our names."""
    from transformers.data.metrics.squad_metrics import squad_evaluate

    asked = [
        SimpleNamespace(qas_id=number, answers=[{"text": text} for text in each]) for number, each in enumerate(rights)
    ]
    found = squad_evaluate(asked, dict(enumerate(told)))
    names = {"exact": "exact", "f1": "f1", "HasAns_exact": "has_answer_exact", "HasAns_f1": "has_answer_f1"}
    names["NoAns_exact"] = "no_answer_exact"
    return {name: found[key] / 100 for key, name in names.items() if key in found}


def export_masked_lm(config: ModelConfig, tokenizer: Path, out: Path, *, max_tokens: int = 64, seed: int = 3) -> Path:
    """Export an encoder with random weights and the head of masked tokens."""
    model = build_model(config, MaskedLmConfig())
    initialize(model, config, seed)
    state = {key: value for key, value in model.state_dict().items() if key != "decoder.weight" or not config.tied}
    export(state, config, max_tokens=max_tokens, tokenizer_folder=tokenizer, out=out, card="")
    return out
