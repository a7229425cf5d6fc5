"""A small model pretrained here, then every small task: is it better than its untrained twin, and than a frozen head?

    python -m benchmarks.judged --text 'texts/*.jsonl.zst' --tasks tasks --out runs/judged   # again to go on

Pretrains a ModernBERT of 4.4 million parameters on plain text, within an hour of two CPU cores, and fine-tunes it by
`finetune` on each task of `--tasks` that is there, with several seeds. Beside it in the same table, by the same code:
the same architecture and tokenizer with fresh weights, fine-tuned as long (`untrained:`), and the pretrained encoder
with nothing but a linear head trained (`frozen:`). Whatever is done stays in --out.

Tasks: glue/QNLI/dev.tsv (its first 4,463 pairs to learn from, the last 1,000 to be judged by; sentences of one
paragraph may stand in both), glue/STS-B-open/{train,dev}.tsv, glue/WNLI/{train,dev}.tsv,
other_tasks/banking77_{train,test}.csv, other_tasks/wnut17_{train,dev}.conll.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.prepare import main as prepare
from modernbert_train.config.load import load_run
from modernbert_train.files import write_whole
from modernbert_train.train.session import train

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 8192
QNLI_HELD_OUT = 1000
MODEL: dict[str, Any] = {
    "name": "modernbert",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 4,
    "intermediate_size": 384,
    "init_std": 0.05,
    "attention_out_dropout": 0.0,
}
# one setting for all models: small ones want higher rates than the published tables of base and large
TRAINING: dict[str, Any] = {"lr": 5e-4, "weight_decay": 1e-5, "batch_texts": 32}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="documents, a file or a pattern of .jsonl or .jsonl.zst")
    parser.add_argument("--tasks", type=Path, required=True, help="folder of labelled texts")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/judged", help="where everything stays")
    parser.add_argument("--tokens", type=int, default=6_000_000, help="of pretraining")
    options = parser.parse_args(words)
    pretrained(options.text, options.out, options.tokens)


def pretrained(text: str, out: Path, tokens: int) -> Path:
    """The run's folder: trained now, or as far as it was left."""
    data = out / "data"
    if not (data / "train").is_dir():
        source = f"sources={{text: {{kind: jsonl, path: '{Path(text).absolute()}'}}}}"
        assert prepare([f"out={data}", source, f"tokenizer.vocab_size={VOCABULARY}"]) == 0
    phase = {"row_tokens": 512, "batch_rows": 8, "microbatch_tokens": 4096}
    schedule = {"warmup_tokens": tokens // 20, "decay_tokens": tokens // 4, "decay": "one_minus_sqrt"}
    run = {
        "name": "pretrained",
        "runs_folder": str(out),
        "seed": 17,
        "data": {part: str(data / part) for part in ("train", "validation", "tokenizer")},
        "model": MODEL,
        "optim": {"name": "stable_adamw", "lr": 2e-3, "betas": [0.9, 0.98], "weight_decay": 1e-5},
        "phases": {"all": {"tokens": tokens, **phase, "schedule": schedule | {"final_lr_ratio": 0.01}}},
        "eval": {"max_tokens": 50_000},
        "compute": {"device": "cpu", "precision": "fp32"},
        "logging": {"progress_bar": False},
    }
    file = out / "pretrained.yaml"
    write_whole(file, json.dumps(run))  # JSON is YAML
    train(load_run([file], []))
    return out / "pretrained"


if __name__ == "__main__":
    main()
