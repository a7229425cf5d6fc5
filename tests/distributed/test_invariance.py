"""The same run for any cut: into microbatches, over ranks, by DDP, FSDP2 and HSDP, within float error.

If this breaks, a result depends on the machine it was made on. The one- and two-rank runs of test_train_ranks.py use
the launcher; here the four ranks live on from run to run, since starting them takes longer than training.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modernbert_train.__main__ import main
from tests.support.gloo import run_ranks
from tests.support.ranks import HSDP, assert_same_weights, drop_newest, train_each
from tests.support.runs import assert_same_run, records
from tests.support.tiny_run import TinyRun

# rows of 64 one at a time, so that 4 ranks share microbatches evenly; and dropout, which is keyed by them
CUT = ("phases.short.microbatch_tokens=64", "model.attention_out_dropout=0.1", "phases.short.tokens=2500")


@pytest.mark.weekly
@pytest.mark.slow
def test_four_ranks_train_as_one_does_under_ddp_fsdp2_and_hsdp(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Dropout on. And a checkpoint continues under another strategy: HSDP's on one process, and one process's on HSDP,
    with Composer's callbacks and loggers, which must neither hang four ranks nor see shards for wholes."""
    runs = tmp_path / "runs"
    plugins = (
        "callbacks.optimizer_monitor={batch_log_interval: 1}",
        "loggers={file: {capture_stdout: false}, wandb: {}}",
    )
    for name in ("one", "moved"):
        assert main(["train", *tiny_run(*CUT, f"name={name}")]) == 0
    drop_newest(runs / "moved")
    lines = [
        tiny_run(*CUT, f"name={name}", *words)
        for name, words in {
            "ddp": ("distributed.strategy=ddp",),
            "fsdp2": ("distributed.strategy=fsdp2",),
            "hsdp": HSDP,
            "moved": (*HSDP, *plugins),
        }.items()
    ]
    found = run_ranks(train_each, 4, lines, timeout_seconds=280)
    # Composer replaces a mesh that it is given, so that HSDP would quietly be FSDP2 over all ranks; not ours
    assert found == [[(4,), (2, 2)]] * 4
    for name in ("ddp", "fsdp2", "hsdp", "moved"):
        assert_same_run(runs / name, runs / "one")
        assert_same_weights(runs / name, runs / "one")

    drop_newest(runs / "hsdp")
    assert main(["train", *tiny_run(*CUT, "name=hsdp")]) == 0
    assert records(runs / "hsdp", "resume") and records(runs / "moved", "resume")
    assert_same_run(runs / "hsdp", runs / "one")

    resumed = [entry for entry in records(runs / "moved") if entry["phase"] == "long"]
    (log,) = (runs / "moved").glob("log-*.txt")
    said = log.read_text(encoding="utf-8")
    for entry in resumed:
        (line,) = [x for x in said.splitlines() if f"[batch={entry['step']}]: l2_norm/grad/global: " in x]
        assert float(line.split()[-1]) == pytest.approx(entry["grad_norm"], abs=2e-4)
    (offline,) = (runs / "moved/wandb").glob("offline-run-*/*.wandb")
    assert offline.read_bytes().count(b"train/loss") >= len(resumed)


@pytest.mark.runs
def test_microbatches_do_not_change_the_run(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Without dropout, whose key is the microbatch."""
    runs = tmp_path / "runs"
    for name, tokens in (("64", 64), ("512", 512)):
        words = (f"phases.short.microbatch_tokens={tokens}", f"phases.long.microbatch_tokens={max(128, tokens)}")
        assert main(["train", *tiny_run(f"name=of{name}", *words)]) == 0
    assert_same_run(runs / "of64", runs / "of512")
    assert_same_weights(runs / "of64", runs / "of512")
