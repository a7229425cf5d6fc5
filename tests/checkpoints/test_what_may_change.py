"""Keys that may change in a run's folder between two starts, and the messages about those that may not.

If too many may change, a run silently trains half of its text at another rate; if too few, it cannot move to another
machine. Trained phases: test_resume_rules.py. Data: train/test_start_decisions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from modernbert_train.checkpoints.run_folder import RunFolder
from modernbert_train.config.load import load_run
from modernbert_train.errors import ConfigError

PHASE = "{tokens: 100, row_tokens: 8, batch_rows: 2, microbatch_tokens: 8}"
REST = (
    *("name=kept", "optim={name: stable_adamw, lr: 1}", "data.tokenizer=tokenizer", "data.validation=held_out"),
    "start.checkpoint=elsewhere",
)
PHASES = (f"phases.short={PHASE}", f"phases.long={PHASE}")
ONE_STREAM = (*REST, *PHASES, "data.train=shards")
STREAMS = ("data.streams.web={path: web, proportion: 0.5}", "data.streams.law={path: law, proportion: 0.5}")
TWO_STREAMS = (*REST, *PHASES, *STREAMS)


def compare(runs: Path, then: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the messages of a run's folder when it is opened with another configuration."""
    folder = RunFolder(load_run([], [f"runs_folder={runs}", *then]))
    folder.path.mkdir(parents=True)
    folder.save_config()
    return RunFolder(load_run([], [f"runs_folder={runs}", *now])).compare()


# override -> message about it; all of them are given together
MAY = {
    # machine and speed
    "compute.device=cpu": "compute.device: auto -> cpu",
    "data.num_workers=7": "data.num_workers: 1 -> 7",
    "data.prefetch_batches=7": "data.prefetch_batches: 2 -> 7",
    "data.worker_timeout_seconds=7": "data.worker_timeout_seconds: 300.0 -> 7.0",
    "data.cache_folder=cache": "data.cache_folder: None -> cache",
    "data.cache_limit_bytes=7": "data.cache_limit_bytes: None -> 7",
    "data.download_timeout_seconds=7": "data.download_timeout_seconds: 60.0 -> 7.0",
    "compute.attention=sdpa": "compute.attention: auto -> sdpa",
    "compute.global_attention=flex": "compute.global_attention: None -> flex",
    "compute.compile=true": "compute.compile: False -> True",
    "optim.fused=true": "optim.fused: False -> True",
    "compute.threads=7": "compute.threads: None -> 7",
    "compute.activation_checkpointing=true": "compute.activation_checkpointing: False -> True",
    "distributed.strategy=fsdp2": "distributed.strategy: ddp -> fsdp2",
    "distributed.timeout_seconds=7": "distributed.timeout_seconds: 300.0 -> 7.0",
    "launch.nodes=2": "launch.nodes: 1 -> 2",
    # location of the same data: their hashes are compared with the checkpoint's
    "data.train=moved": "data.train: shards -> moved",
    "data.validation=moved": "data.validation: held_out -> moved",
    "data.tokenizer=moved": "data.tokenizer: tokenizer -> moved",
    # evaluation and display
    "eval.interval_tokens=7": "eval.interval_tokens: None -> 7",
    "checkpoint.keep=7": "checkpoint.keep: 3 -> 7",
    "stability.spike=skip": "stability.spike: ignore -> skip",
    "logging.progress_bar=false": "logging.progress_bar: True -> False",
    "profile.steps=7": "profile.steps: None -> 7",
    "loggers.wandb.project=mine": "loggers.wandb.project: None -> mine",
    "callbacks.lr_monitor={}": "callbacks.lr_monitor: None -> {}",
    # the future part of the plan; the trained part is compared with the checkpoint
    "phases.long.tokens=99": "phases.long.tokens: 100 -> 99",
    "phases.short.microbatch_tokens=16": "phases.short.microbatch_tokens: 8 -> 16",
}
MAY_NOT = {
    "seed=7": "seed: 17 -> 7",
    "compute.precision=fp32": "compute.precision: auto -> fp32",
    "compute.residual_precision=bf16": "compute.residual_precision: fp32 -> bf16",
    "data.mix_by=documents": "data.mix_by: tokens -> documents",
    "data.packing_window=7": "data.packing_window: 128 -> 7",
    "data.max_wait_rows=7": "data.max_wait_rows: 2048 -> 7",
    "data.shuffle_block_shards=7": "data.shuffle_block_shards: 16 -> 7",
    "model.hidden_size=384": "model.hidden_size: 768 -> 384",
    "model.num_layers=7": "model.num_layers: 22 -> 7",
    "model.local_attention=64": "model.local_attention: 128 -> 64",
    "model.local_rope_theta=7": "model.local_rope_theta: 10000.0 -> 7.0",
    "model.attention_out_dropout=0": "model.attention_out_dropout: 0.1 -> 0.0",
    "weights.init_from=there": "weights.init_from: None -> there",
    "objective.mask_rate=0.2": "objective.mask_rate: 0.3 -> 0.2",
    "objective.eval_mask_rate=0.2": "objective.eval_mask_rate: 0.15 -> 0.2",
    "optim.lr=2": "optim.lr: 1.0 -> 2.0",
    "optim.betas=[0.9, 0.95]": "optim.betas: (0.9, 0.98) -> (0.9, 0.95)",
    "start.checkpoint=nowhere": "start.checkpoint: elsewhere -> nowhere",
    "start.clock=keep": "start.clock: reset -> keep",
}


@pytest.mark.runs
def test_what_may_change_is_reported(tmp_path: Path) -> None:
    assert {*MAY.values()} <= {*compare(tmp_path, ONE_STREAM, (*ONE_STREAM, *MAY))}


@pytest.mark.runs
def test_a_refusal_names_what_is_in_the_way_with_both_values_and_nothing_else(tmp_path: Path) -> None:
    """Otherwise a reader would look for a mistake in the allowed changes."""
    with pytest.raises(ConfigError) as refused:
        compare(tmp_path, ONE_STREAM, (*ONE_STREAM, *MAY_NOT, "checkpoint.keep=7"))
    first, *changes, last = str(refused.value).splitlines()
    assert first.endswith("/kept holds a run with another configuration:")
    assert sorted(changes) == sorted(f"  {change}" for change in MAY_NOT.values())
    assert all(word in last for word in ("name=", "restore the values", "--fresh"))


@pytest.mark.runs
@pytest.mark.parametrize(
    ("there", "now", "change", "may"),
    [
        (ONE_STREAM, f"phases.more={PHASE}", "phases.more.tokens: None -> 100", True),
        (ONE_STREAM, "phases.long=null", "phases.long.tokens: 100 -> None", True),
        (ONE_STREAM, "data.validation=null", "data.validation: held_out -> None", True),
        (ONE_STREAM, "optim={name: adamw, lr: 1}", "optim.name: stable_adamw -> adamw", False),
        (TWO_STREAMS, "data.streams.web.path=moved", "data.streams.web.path: web -> moved", True),
        (TWO_STREAMS, "data.streams={web: {proportion: 0.6}, law: {proportion: 0.4}}",
         "data.streams.web.proportion: 0.5 -> 0.6", False),
        (TWO_STREAMS, "data.streams.law=null", "data.streams.law.path: law -> None", False),
        (TWO_STREAMS, "data.streams.news={path: news, proportion: 0.5}", "data.streams.news.path: None -> news", False),
    ],
)  # fmt: skip
def test_what_comes_goes_or_moves(tmp_path: Path, there: Sequence[str], now: str, change: str, may: bool) -> None:
    """Trained phases are compared with the checkpoint, see resume_rules.py; streams neither come nor go."""
    with nullcontext() if may else pytest.raises(ConfigError, match=change):
        assert change in compare(tmp_path, there, (*there, now))


@pytest.mark.runs
def test_phases_in_another_order_are_reported(tmp_path: Path) -> None:
    """Every key of them is unchanged. Whether the order may change depends on the phases trained so far."""
    found = compare(tmp_path, ONE_STREAM, (*REST, *reversed(PHASES), "data.train=shards"))
    assert found == ["phases: ['short', 'long'] -> ['long', 'short']"]


@pytest.mark.parametrize("runs", ["same", "empty", "absent"])
def test_nothing_differs(tmp_path: Path, runs: str) -> None:
    """The same command again; a folder that was created and never used; no folder."""
    folder = RunFolder(load_run([], [f"runs_folder={tmp_path}", *ONE_STREAM]))
    if runs != "absent":
        folder.path.mkdir()
    if runs == "same":
        folder.save_config()
    assert folder.compare() == []
