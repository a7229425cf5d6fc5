"""Tiny runs of every encoder with every objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from modernbert_train.config.schema import BertConfig
from tests.support.labelled import export_masked_lm
from tests.support.pairs import as_source, prepare_pairs, write_rows

SMALL = {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
ENCODERS: dict[str, dict[str, Any]] = {
    "modernbert": SMALL | {"num_layers": 4, "local_attention": 16},
    "bert": SMALL | {"num_layers": 2, "max_positions": 128},
    "distilbert": SMALL | {"num_layers": 2, "max_positions": 128},
    "albert": SMALL | {"num_layers": 4, "embedding_size": 16, "group_layers": 2, "max_positions": 128},
    "xlnet": SMALL | {"num_layers": 2},
    "deberta": SMALL | {"num_layers": 2, "max_positions": 128, "buckets": 8, "max_distance": 16},
    "llama": SMALL | {"num_layers": 2, "key_value_heads": 1, "tied": False},
    "neobert": SMALL | {"num_layers": 2},
    "esm": SMALL | {"num_layers": 2},
    "gemma": SMALL | {"num_layers": 2, "head_width": 16, "local_attention": 8, "global_every": 2},
}
# objectives that compare texts, on shards of pairs; the second with a vector for each token
COMPARING = {"contrastive": {}, "late": {"pooling": "late", "token_vectors": 16}}
OBJECTIVES = ("mlm", "causal", "sop", "permutation", "rtd", "distill", *COMPARING)
# all that read shards of pairs, the ones that only tests/curves trains included
ON_PAIRS: dict[str, dict[str, Any]] = {name: {"name": "contrastive"} | keys for name, keys in COMPARING.items()}
ON_PAIRS |= {"sparse": {"name": "contrastive", "pooling": "sparse"}, "tlm": {"name": "tlm"}}
PAIRS = [(encoder, objective) for encoder in ENCODERS for objective in OBJECTIVES]
PAIRS.remove(("neobert", "rtd"))  # NeoBERT's decoder is not tied to the embedding, as a generator's is


def system(words: list[str], encoder: str, objective: str) -> list[str]:
    """The tiny run with another encoder and objective, and the pairs or the teacher that this needs."""
    file = Path(words[0])
    run = yaml.safe_load(file.read_text())
    run["model"] = {"name": encoder} | ENCODERS[encoder]
    run["objective"] = dict(ON_PAIRS.get(objective, {"name": objective}))
    if objective in ON_PAIRS:
        pairs = make_pairs(Path(run["data"]["tokenizer"]), file.parent / "pairs")
        run["data"] |= {"train": str(pairs / "train"), "validation": str(pairs / "validation")}
    if objective == "distill":
        run["objective"]["teacher"] = str(make_teacher(Path(run["data"]["tokenizer"]), file.parent / "teacher"))
    if objective == "rtd":
        run["model"].pop("tied", None)
    if encoder != "modernbert":
        del run["phases"]["long"]["model"]
    file.write_text(yaml.safe_dump(run, sort_keys=False))
    return words


def make_pairs(tokenizer: Path, folder: Path) -> Path:
    """Shards of pairs of which each fits in the shortest row, with a negative, a tenth held out; made once."""
    if not folder.exists():
        texts = ("query", "positive", "negative")
        rows = [{text: f"{number} {text[:2]} {number % 7}" for text in texts} for number in range(120)]
        file = write_rows(folder.with_suffix(".jsonl"), rows)
        texts = {"negatives": ["negative"], "max_tokens": 20}
        assert prepare_pairs(folder, as_source(file), tokenizer, "validation_share=0.1", **texts) == 0
    return folder


def make_teacher(tokenizer: Path, folder: Path) -> Path:
    """A BERT that has learnt nothing; made once."""
    if not folder.exists():
        export_masked_lm(BertConfig(**ENCODERS["bert"]), tokenizer, folder, max_tokens=128, seed=9)
    return folder
