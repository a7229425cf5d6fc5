"""Check NCCL's collectives against sums on the host: python -m benchmarks.collectives --ranks 2

Starts that many ranks, each on its own GPU or, with fewer GPUs, several on one (set NCCL_HOSTID then).
Every collective of training runs with each size and type, and in a group of half of the ranks. Numbers are small
integers, so every sum is exact in bf16 too. Prints a line for each case; exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from modernbert_train.config.schema import ComputeConfig
from modernbert_train.distributed.compute import choose_device
from modernbert_train.distributed.group import gather_from_all, joined

ROOT = Path(__file__).resolve().parent.parent
SIZES = (8, 4 << 20, 256 << 20)  # bytes of a message
TYPES = (torch.float32, torch.bfloat16)
TIMEOUT_SECONDS = 120.0


def values(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    """Return the values that a rank sends, on the host: integers from 0 to 60, different on each rank.

    They repeat after 61, which does not divide the pieces of a message, so pieces of other ranks differ.
    """
    return ((torch.arange(number, dtype=torch.int32) * 3 + 5 * rank) % 61).to(dtype)


def cases(
    rank: int, ranks: int, number: int, dtype: torch.dtype, device: torch.device, half: dist.ProcessGroup
) -> dict[str, Callable[[], bool]]:
    """Return each collective's name and a function that runs it and compares its result with the host's.

    Args:
        rank: number of this rank.
        ranks: world size.
        number: number of values that each rank sends.
        dtype: of the values.
        device: of this rank.
        half: process group of this rank's half of the ranks.
    """
    all_values = [values(each, number, dtype) for each in range(ranks)]
    mine, part = all_values[rank].to(device), number // ranks

    def total(members: Sequence[int]) -> Tensor:
        collectives = all_values[members[0]].float()
        for each in members[1:]:
            collectives = collectives + all_values[each].float()
        return collectives

    def same(collectives: Tensor, expected: Tensor) -> bool:
        return torch.equal(collectives.float().cpu(), expected.float())

    def all_reduce() -> bool:
        collectives = mine.clone()
        dist.all_reduce(collectives)
        return same(collectives, total(range(ranks)))

    def all_reduce_in_half() -> bool:
        collectives = mine.clone()
        dist.all_reduce(collectives, group=half)
        return same(collectives, total(half_of(rank, ranks)))

    def all_gather() -> bool:
        collectives = mine.new_empty(number * ranks)
        dist.all_gather_into_tensor(collectives, mine)
        return same(collectives, torch.cat(all_values))

    def reduce_scatter() -> bool:
        collectives = mine.new_empty(part)
        dist.reduce_scatter_tensor(collectives, mine[: part * ranks].contiguous())
        return same(collectives, total(range(ranks))[part * rank : part * (rank + 1)])

    def broadcast() -> bool:
        collectives = mine.clone()
        dist.broadcast(collectives, src=ranks - 1)
        return same(collectives, all_values[-1])

    def all_to_all() -> bool:
        collectives = mine.new_empty(part * ranks)
        dist.all_to_all_single(collectives, mine[: part * ranks].contiguous())
        return same(collectives, torch.cat([each[part * rank : part * (rank + 1)] for each in all_values]))

    collectives = {
        "all_reduce": all_reduce,
        "all_reduce in each half": all_reduce_in_half,
        "all_gather": all_gather,
        "broadcast": broadcast,
    }
    return collectives | ({"reduce_scatter": reduce_scatter, "all_to_all": all_to_all} if part else {})


def half_of(rank: int, ranks: int) -> range:
    """Return the ranks in the same half as this one."""
    return range(ranks // 2) if rank < ranks // 2 else range(ranks // 2, ranks)


def barrier(rank: int, device: torch.device) -> bool:
    """Return True if no rank left a barrier before the last rank, which is late, reached it."""
    if rank == 0:
        time.sleep(0.2)
    came = time.monotonic()  # comparable, since all ranks are on one machine
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    times = gather_from_all((came, time.monotonic()))
    return min(leave_time for _, leave_time in times) >= max(came for came, _ in times)


def run_rank(sizes: Sequence[int]) -> int:
    """Run every case on this rank, with messages of these sizes; return 1 if one is wrong on any rank."""
    device = choose_device(ComputeConfig(device="auto"))
    wrong: list[str] = []
    with joined(device, TIMEOUT_SECONDS):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        halves = [dist.new_group([*half_of(each, ranks)]) for each in (0, ranks - 1)]  # every rank makes both
        half = halves[rank not in half_of(0, ranks)]
        assert isinstance(half, dist.ProcessGroup), "each rank is in one of the halves"

        def check(name: str, case: Callable[[], bool]) -> None:
            bad = torch.tensor(float(not case()))
            dist.all_reduce(bad)  # a CPU tensor
            name = f"{name} on {ranks} ranks"
            if bad:
                wrong.append(name)
            if rank == 0:
                print(f"{'WRONG' if bad else 'ok   '} {name}", flush=True)

        for size in sizes:
            for dtype in TYPES:
                number = size // dtype.itemsize
                for name, case in cases(rank, ranks, number, dtype, device, half).items():
                    check(f"{name} of {size:,} bytes in {str(dtype).removeprefix('torch.')}", case)
        check("barrier", lambda: barrier(rank, device))
        if wrong and rank == 0:
            print(f"error: {len(wrong)} collectives are wrong, the first is {wrong[0]}", flush=True)
    return int(bool(wrong))


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
