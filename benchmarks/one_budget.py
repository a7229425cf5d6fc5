"""Encoders and objectives on one text, with the FLOPs of one run of masked ModernBERT, judged by fine-tuning.

    python -m benchmarks.one_budget --text books.jsonl.zst --tasks TASKS --out runs/one_budget   # hours; again to go on

Every system trains a small model from scratch, for as many tokens as the budget allows by the FLOPs that `plan` counts.
What is trained is judged by `evaluate`, which also judges an untrained twin of the first. Done runs are not repeated.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from modernbert_train.config.load import load_run
from modernbert_train.plan.make import make_plan

SMALL = {"vocab_size": 2048, "hidden_size": 128, "num_layers": 4, "num_heads": 2, "init_std": 0.05}
MODERNBERT = {"name": "modernbert", **SMALL, "intermediate_size": 192}
BERT = {"name": "bert", **SMALL, "intermediate_size": 512, "dropout": 0.0, "max_positions": 256}
DEBERTA = {"name": "deberta", **SMALL, "intermediate_size": 512, "dropout": 0.0, "buckets": 32, "max_distance": 256}
LLAMA = {"name": "llama", **SMALL, "intermediate_size": 352, "key_value_heads": 2}
NEOBERT = {"name": "neobert", **SMALL, "intermediate_size": 352}
GEMMA = {"name": "gemma", **SMALL, "intermediate_size": 352, "key_value_heads": 1, "head_width": 64}
MASKED: dict[str, Any] = {"name": "mlm"}
RATES = {"modernbert": 2e-3, "llama": 2e-3, "gemma": 2e-3, "neobert": 2e-3}  # with norms before; others 1e-3

# system -> model, objective, objective of the second half
SYSTEMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "modernbert": (MODERNBERT, MASKED, None),
    "modernbert-spread": (MODERNBERT, {**MASKED, "mask_spread": 0.2}, None),
    "modernbert-falling": (MODERNBERT, {**MASKED, "mask_rate": 0.45, "mask_rate_end": 0.15}, None),
    "bert": (BERT, MASKED, None),
    "deberta": (DEBERTA, MASKED, None),
    "deberta-rtd": (DEBERTA, {"name": "rtd", "sharing": "gdes"}, None),
    "llama": (LLAMA, MASKED, None),
    "llama-before": (LLAMA, {**MASKED, "predict_from": "before"}, None),
    "llama-causal-first": (LLAMA, {"name": "causal"}, {**MASKED, "predict_from": "before"}),
    "gemma": (GEMMA, MASKED, None),
    "neobert": (NEOBERT, MASKED, None),
}


def run_of(system: str, seed: int, tokens: int, out: Path) -> dict[str, Any]:
    """The YAML of a run of so many tokens."""
    model, first, second = SYSTEMS[system]
    shape = {"row_tokens": 256, "batch_rows": 8, "microbatch_tokens": 2048}
    whole = {**shape, "tokens": tokens}
    warmup, decay = {"warmup_tokens": tokens // 20}, {"decay_tokens": tokens // 4, "decay": "one_minus_sqrt"}
    phases: dict[str, Any] = {"all": {**whole, "schedule": {**warmup, **decay}}}
    if second is not None:
        half = {**shape, "tokens": tokens // 2}
        phases = {
            "first": {**half, "objective": first, "schedule": warmup},
            "second": {**half, "schedule": decay},  # with the objective of the run
        }
    return {
        "name": f"{system}-{seed}",
        "runs_folder": str(out / "runs"),
        "seed": seed,
        "data": {part: str(out / "data" / part) for part in ("train", "validation", "tokenizer")},
        "model": model,
        "objective": first if second is None else second,
        "optim": {"name": "stable_adamw", "lr": RATES.get(model["name"], 1e-3), "betas": [0.9, 0.98]},
        "phases": phases,
        "eval": {"times_per_phase": 1, "max_tokens": 100_000},
        "compute": {"device": "cpu", "precision": "fp32"},
        "logging": {"progress_bar": False},
    }


def written(system: str, seed: int, tokens: int, out: Path) -> Path:
    file = out / f"{system}-{seed}.yaml"
    file.write_text(yaml.safe_dump(run_of(system, seed, tokens, out), sort_keys=False), encoding="utf-8")
    return file


def flops(file: Path) -> float:
    """Of training, over all phases."""
    return sum(phase.flops.training for phase in make_plan(load_run([file], []), ranks=1).phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="documents, .jsonl or .jsonl.zst")
    parser.add_argument("--tasks", type=Path, required=True, help="a suite that `evaluate` takes")
    parser.add_argument("--out", type=Path, required=True, help="where everything stays")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the first system; others get its FLOPs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)

    def command(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "modernbert_train", *words], check=True)

    if not (out / "data/tokenizer").exists():
        data = {"out": str(out / "data"), "sources": {"text": {"kind": "jsonl", "path": str(options.text.absolute())}}}
        (out / "data.yaml").write_text(yaml.safe_dump({**data, "tokenizer": {"vocab_size": 2048}}), encoding="utf-8")
        command("prepare", str(out / "data.yaml"))
    for seed in options.seeds:  # all systems of a seed before the next, so that what is cut short compares
        budget = flops(written("modernbert", seed, options.tokens, out))
        for system in SYSTEMS:
            tokens = round(options.tokens * budget / flops(written(system, seed, options.tokens, out)))
            command("train", str(written(system, seed, tokens, out)))
        runs = [str(out / "runs" / f"{system}-{seed}") for system in SYSTEMS]
        untrained = f"untrained:{runs[0]}"
        command("evaluate", *runs, untrained, "--suite", str(options.tasks), "--out", str(out / f"judged-{seed}"))


if __name__ == "__main__":
    main()
