"""What a checkpoint costs a run: how long the step is held up, and how long it takes until it is on the disk.

    python -m benchmarks.checkpoints --out /tmp/checkpoints                    # 30 M, 150 M and 400 M, 1 and 2 ranks
    python -m benchmarks.checkpoints --out /tmp/checkpoints --sizes 30m --ranks 1

Three ways, each several times in one process, on the same model with the moments of StableAdamW: gathered whole on rank
0 and written in the loop, as it was before; shares that are copied and written behind the run, as it is now; and
torch.distributed.checkpoint.async_save. One rank has a plain model, several have FSDP2. While a checkpoint is being
written, steps of a fixed amount of work are taken, and their time is compared with that of such steps alone: what the
writer takes from training. A way's first checkpoint, which allocates its memory, is a column of its own.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.train_step import BASE, LARGE
from modernbert_train.checkpoints.manifest import FileHash
from modernbert_train.checkpoints.saver import Saver, Snapshot
from modernbert_train.core.files import publish
from modernbert_train.core.tensor_files import write_tensors
from modernbert_train.core.text import table
from modernbert_train.models.modernbert import ModernBertForMaskedLM
from modernbert_train.optim.stable_adamw import StableAdamW
from modernbert_train.weights.gather import gather_optimizer, gather_weights
from modernbert_train.weights.shares import Copier

SIZES = {
    "30m": replace(BASE, hidden_size=384, num_layers=7, num_heads=6, intermediate_size=576),
    "150m": BASE,
    "400m": LARGE,
}
INTERVAL_SECONDS = 600.0
WAYS = ("before", "now", "dcp")
Save = Callable[[int], Callable[[], object]]  # of a step: returns once the step may go on; the rest waits for the disk


def before(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Save:
    """Gathered on rank 0, looked through, written, hashed and renamed, while training stands still."""

    def save(step: int) -> Callable[[], object]:
        writes = dist.get_rank() == 0
        weights, moments = gather_weights(model, keep=writes), gather_optimizer(model, optimizer, keep=writes)
        if writes:
            assert all(bool(torch.isfinite(tensor).all()) for tensor in (weights | moments).values())
            staging = folder / f"{step}.partial"
            staging.mkdir()
            for name, tensors in (("model", weights), ("optimizer", moments)):
                write_tensors(staging / name, tensors)
                FileHash.of(staging / name)
            publish(staging, folder / str(step))
        dist.barrier()
        return lambda: None

    return save


def now(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Save:
    ranks = list(range(dist.get_world_size()))
    copier, saver = Copier(dist.get_rank(), ranks, len(ranks)), Saver(folder, 1, ranks, 600.0)

    def save(step: int) -> Callable[[], object]:
        share, total = copier.copy(model, optimizer)
        saver.start(Snapshot(step, share, copier.wait, total, "{}", "", False, False))
        return saver.wait

    return save


def dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Save:
    import torch.distributed.checkpoint as library

    def save(step: int) -> Callable[[], object]:
        state: dict[str, Any] = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            state |= {f"{key}/{name}": value for key, value in optimizer.state[parameter].items()}
        future = library.async_save(state, checkpoint_id=str(folder / str(step)))  # type: ignore[attr-defined]
        return future.result  # type: ignore[union-attr]

    return save


def one_step(left: torch.Tensor, right: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(4):
        left @ right
    return time.perf_counter() - began


def measure(rank: int, ranks: int, port: int, size: str, out: str, repeats: int, result: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model: nn.Module = ModernBertForMaskedLM(SIZES[size])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = StableAdamW(model.parameters(), 1e-4, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    left, right = torch.randn(768, 768), torch.randn(768, 768)
    rows: list[dict[str, Any]] = []
    for name, make in (("before", before), ("now", now), ("dcp", dcp)):
        folder = Path(out, name)
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        save = make(model, optimizer, folder)
        for number in range(repeats + 1):
            alone = [one_step(left, right) for _ in range(20)]
            dist.barrier()
            began = time.perf_counter()
            wait = save(number)
            blocked = time.perf_counter() - began
            deadline, beside = time.perf_counter() + 3.0, []
            while time.perf_counter() < deadline:
                beside.append(one_step(left, right))
            wait()
            dist.barrier()
            total = time.perf_counter() - began
            slower = statistics.median(beside) / statistics.median(alone)
            rows.append({"way": name, "first": number == 0, "blocked": blocked, "total": total, "slower": slower})
            if rank == 0:
                size_on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                rows[-1]["bytes"] = size_on_disk
                for path in folder.iterdir():
                    shutil.rmtree(path)
        del save, wait
        gc.collect()
    if rank == 0:
        result.send((parameters, rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder on the disk that is measured")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3, help="checkpoints of each way, after its first")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    heads = (
        "model",
        "ranks",
        "way",
        "GB",
        "first blocked s",
        "blocked s",
        "of before",
        "of 10 min",
        "on disk s",
        "steps",
    )
    lines: list[tuple[str, ...]] = [heads]
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
    for size in options.sizes:
        for ranks in options.ranks:
            options.out.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(dir=options.out)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            receiver, sender = context.Pipe(duplex=False)
            work = (ranks, store.port, size, folder, options.repeats, sender)
            processes = [context.Process(target=measure, args=(rank, *work)) for rank in range(ranks)]
            for process in processes:
                process.start()
            sender.close()
            try:
                parameters, rows = receiver.recv()
            finally:
                for process in processes:
                    process.join()
                shutil.rmtree(folder, ignore_errors=True)
            blocked = {}
            for way in WAYS:
                first, *rest = (row for row in rows if row["way"] == way)
                middle = {key: statistics.median(row[key] for row in rest) for key in ("blocked", "total", "slower")}
                blocked[way] = middle["blocked"]
                lines.append(
                    (
                        f"{parameters / 1e6:.0f} M",
                        str(ranks),
                        way,
                        f"{first['bytes'] / 1e9:.2f}",
                        f"{first['blocked']:.3f}",
                        f"{middle['blocked']:.3f}",
                        f"{middle['blocked'] / blocked['before']:.1%}",
                        f"{middle['blocked'] / INTERVAL_SECONDS:.3%}",
                        f"{middle['total']:.1f}",
                        f"x {middle['slower']:.2f}",
                    )
                )
            print(table(lines, numbers=True), flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
