"""Check NCCL's collectives against sums on the host: python -m benchmarks.collectives --ranks 2

Starts that many ranks, each on a GPU of its own or, where there are fewer GPUs, several on one (set NCCL_HOSTID then).
Every collective that training uses runs with each size and type, and in a group of half of the ranks. Numbers are small
integers, so every sum is exact in bf16 too. Prints a line for each case; exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from modernbert_train.config.schema import ComputeConfig
from modernbert_train.distributed.compute import choose_device
from modernbert_train.distributed.group import joined

ROOT = Path(__file__).resolve().parent.parent
SIZES = (8, 4 << 20, 256 << 20)  # bytes of a message
TYPES = (torch.float32, torch.bfloat16)
TIMEOUT_SECONDS = 120.0


def values(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank sends, on the host: integers from 0 to 15, other ones on each rank."""
    return ((torch.arange(number) * 3 + 5 * rank) % 16).to(dtype)


def cases(
    rank: int, ranks: int, number: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], bool]]:
    """Return each collective's name and a function that runs it and compares its result with the host's."""
    all_values = [values(each, number, dtype) for each in range(ranks)]
    total = torch.stack([each.float() for each in all_values]).sum(0)
    mine, part = all_values[rank].to(device), number // ranks

    def same(found: Tensor, expected: Tensor) -> bool:
        return torch.equal(found.float().cpu(), expected.float())

    def all_reduce() -> bool:
        found = mine.clone()
        dist.all_reduce(found)
        return same(found, total)

    def all_gather() -> bool:
        found = mine.new_empty(number * ranks)
        dist.all_gather_into_tensor(found, mine)
        return same(found, torch.cat(all_values))

    def reduce_scatter() -> bool:
        found = mine.new_empty(part)
        dist.reduce_scatter_tensor(found, mine[: part * ranks].contiguous())
        return same(found, total[part * rank : part * (rank + 1)])

    def broadcast() -> bool:
        found = mine.clone()
        dist.broadcast(found, src=ranks - 1)
        return same(found, all_values[-1])

    def all_to_all() -> bool:
        found = mine.new_empty(part * ranks)
        dist.all_to_all_single(found, mine[: part * ranks].contiguous())
        return same(found, torch.cat([each[part * rank : part * (rank + 1)] for each in all_values]))

    found = {"all_reduce": all_reduce, "all_gather": all_gather, "broadcast": broadcast}
    return found | ({"reduce_scatter": reduce_scatter, "all_to_all": all_to_all} if part else {})


def in_halves(rank: int, ranks: int, device: torch.device) -> bool:
    """Return True if a sum within each half of the ranks is that half's."""
    half = ranks // 2
    members = [list(range(half)), list(range(half, ranks))]
    groups = [dist.new_group(each) for each in members]
    mine = int(rank >= half)
    found = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(found, group=groups[mine])
    return bool((found.cpu() == sum(each + 1 for each in members[mine])).all())


def run_rank(sizes: Sequence[int]) -> int:
    """Run every case on this rank, with messages of so many bytes; 1 if one of any rank is wrong."""
    device = choose_device(ComputeConfig(device="auto"))
    wrong = 0
    with joined(device, TIMEOUT_SECONDS):
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def check(name: str, case: Callable[[], bool]) -> None:
            nonlocal wrong
            bad = torch.tensor(float(not case()))
            dist.all_reduce(bad)  # over the CPU
            wrong += int(bad)
            if rank == 0:
                print(f"{'ok   ' if not bad else 'WRONG'} {name} on {ranks} ranks", flush=True)

        for size in sizes:
            for dtype in TYPES:
                for name, case in cases(rank, ranks, size // dtype.itemsize, dtype, device).items():
                    check(f"{name} of {size:,} bytes in {str(dtype).removeprefix('torch.')}", case)
        check("all_reduce in each half", lambda: in_halves(rank, ranks, device))
        dist.barrier()
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES, help="sizes of the messages")
    options = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(options.bytes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    sizes = map(str, options.bytes)
    return subprocess.run(
        [*command, "-m", "benchmarks.collectives", "--bytes", *sizes], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
