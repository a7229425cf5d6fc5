"""The same run for any cut: into microbatches, over ranks, by DDP, FSDP2 and HSDP, within float error.

If this breaks, a result depends on the machine it was made on. The one- and two-rank runs of test_train_ranks.py use
the launcher; here the four ranks live on from run to run, since starting them takes longer than training.
"""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from modernbert_train.__main__ import main, read_run
from modernbert_train.errors import RunError
from tests.distributed.gloo import HOST, run_ranks
from tests.distributed.test_train_ranks import assert_same_run, records, weights
from tests.support.tiny_run import TinyRun

# rows of 64 one at a time, so that 4 ranks share microbatches evenly; and dropout, which is keyed by them
CUT = ("phases.short.microbatch_tokens=64", "model.attention_out_dropout=0.1", "phases.short.tokens=2500")
HSDP = ("distributed.strategy=hsdp", "distributed.shard_ranks=2")


def assert_same_weights(folder: Path, expected: Path) -> None:
    found, wanted = weights(folder), weights(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2e-3, atol=2e-5)


def train_each(runs: list[list[str]], of_meshes: bool = True) -> list[tuple[int, ...]]:
    """Run one after the other on every rank, each with a fresh process group, since `train` closes its own.

    Returns:
        See `meshes`.
    """
    from modernbert_train.train.session import train

    rank, num_ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    for number, words in enumerate([*runs, None]):
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"run{number}", dist.TCPStore(HOST, port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
        if words is not None:  # the last group is for run_ranks to end
            train(read_run(words))
    return meshes() if of_meshes else []


def meshes() -> list[tuple[int, ...]]:
    """On 4 ranks: the mesh that the weights have when Composer is given one of 2 x 2, and when `parallelism` asks."""
    from composer.core import State
    from composer.devices import DeviceCPU
    from composer.distributed.prepare_distributed import parallelize_composer_model
    from composer.utils.parallelism import FSDP2Config, ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh

    from modernbert_train.config.schema import DistributedConfig, ModernBertConfig
    from modernbert_train.models.modernbert import ModernBertForMaskedLM
    from modernbert_train.train.adapters import ComposerObjective, assert_sharded, parallelism

    size = ModernBertConfig(vocab_size=64, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8)
    asked = DistributedConfig(strategy="hsdp", shard_ranks=2)
    ours = parallelism(asked, 4)
    shapes = []
    for config in (ParallelismConfig(fsdp2=FSDP2Config(device_mesh=init_device_mesh("cpu", (2, 2)))), ours):
        model = ComposerObjective(ModernBertForMaskedLM(size))
        state = State(
            model=model, rank_zero_seed=0, run_name="x", device=DeviceCPU(), parallelism_config=config, precision="fp32"
        )
        parallelize_composer_model(model, None, state.fsdp_config)
        parameter = next(model.parameters())
        assert isinstance(parameter, DTensor)
        shapes.append(tuple(parameter.device_mesh.shape))
        if config is ours:
            assert_sharded(model, 2)
        else:
            with pytest.raises(RunError, match=r"shard_ranks=2: not in force; .* is shared by 4 of 4 ranks"):
                assert_sharded(model, 2)
    return shapes


def drop_newest(folder: Path) -> None:
    shutil.rmtree(max((folder / "checkpoints").iterdir()))


@pytest.mark.weekly
@pytest.mark.timeout(290)
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
