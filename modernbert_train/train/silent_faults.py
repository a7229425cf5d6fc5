"""Detect faults that raise nothing: a slow rank, and a rank whose copy of the weights differs from the others'.

Both show in numbers that are part of the step's one all-reduce (step_numbers.py), under DDP. There a rank runs no
collective between its first forward pass and the end of its last one, so that time is the rank's own; with sharded
weights every layer waits for the slowest. All ranks receive all times, and the slow one warns.

A checksum c of the weights is summed as c and c^2. N copies are equal if and only if N * sum(c^2) = sum(c)^2, which is
exact in fp64 for 8,192 ranks.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from modernbert_train.distributed.group import gather_from_all, num_ranks, this_rank
from modernbert_train.errors import RunError

SLOWER = 1.1  # times the median of all ranks counts as slow
STEPS = 100  # slow steps in a row before a rank is named; also steps between comparisons of the weights
_PRIME = (1 << 20) - 3  # a flip of any single bit changes the checksum


def checksum(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return a checksum of fp32 weights: an integer below 2^20, as fp64 on their device, in any order of summation."""
    sums = [parameter.detach().view(torch.int32).sum() for parameter in parameters]
    return (torch.stack(sums).sum() % _PRIME).double()


class SilentFaults:
    """One rank's checks for silent faults; each step calls the methods in the order below.

    Args:
        device: this rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []  # start and end of the current step's passes, as they occur
        self._before: list[torch.cuda.Event | float] = []  # marks of the previous step, finished by now on a GPU
        self._slow = self._steps = 0
        self._looked = self._agreed = self._odd = False
        self._checksum = torch.zeros((), dtype=torch.float64)

    def forward(self) -> None:
        """Mark the beginning of the step's first forward pass, after the ranks' exchange before it."""
        if len(self._marks) != 1:
            self._before, self._marks = self._marks, [self._now()]

    def last_loss(self) -> None:
        """Mark the end of the step's last forward pass."""
        self._marks.append(self._now())

    @torch.no_grad()
    def to_sum(self, parameters: Iterable[nn.Parameter], step: int) -> tuple[list[Tensor], list[float]]:
        """Return the values to be summed over ranks: some on the device, some on the host.

        Args:
            parameters: the model's, before the update.
            step: number of the step, from 1.
        """
        seconds = [0.0] * num_ranks()
        seconds[this_rank()] = self._own_seconds()
        self._looked = step % STEPS == 0
        if not self._looked:
            return [], seconds
        self._checksum = checksum(parameters)
        return [self._checksum, self._checksum * self._checksum], seconds

    def check_sums(self, checks: Sequence[float], seconds: Sequence[float], step: int) -> None:
        """Check the sums of all ranks.

        Raises:
            RunError: on every rank, if replicas of the weights differ; names the odd one.
        """
        self._steps += 1
        self._look_for_slow(seconds)
        if self._looked and self._steps > STEPS / 2 and not self._odd:
            c, squares = checks
            self._compare(num_ranks() * squares == c * c, step)

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _own_seconds(self) -> float:
        """Return this rank's seconds in the previous step, without waiting for the device."""
        if len(self._before) < 2:
            return 0.0
        begin, end = self._before[0], self._before[-1]
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        return begin.elapsed_time(end) / 1000

    def _look_for_slow(self, seconds: Sequence[float]) -> None:
        usual, own = statistics.median(seconds), seconds[this_rank()]
        self._slow = self._slow + 1 if usual > 0 and own > SLOWER * usual else 0
        if self._slow == STEPS:  # warn once for each unbroken series of slow steps
            print(
                f"warning: rank {this_rank()} on {socket.gethostname()} is slow: {own / usual:.2f} times the median of "
                f"all ranks in the last step, and more than {SLOWER:g} times in each of the last {STEPS}. All others "
                "wait for it. Check the clocks, the temperature and the memory errors of its GPU (`nvidia-smi -q`), "
                "and the other load of its machine; if it stays slow, start again without that machine.",
                file=sys.stderr,
                flush=True,
            )

    def _compare(self, same: bool, step: int) -> None:
        if same:
            self._agreed = True
            return
        checksums = gather_from_all((float(self._checksum), socket.gethostname()))
        (usual, times), *_ = Counter(value for value, _ in checksums).most_common()
        odd = [f"rank {rank} on {host}" for rank, (value, host) in enumerate(checksums) if value != usual]
        who = ", ".join(odd[:8]) if times > len(checksums) / 2 else "no two halves of the ranks agree"
        if self._agreed:
            error = RunError(
                f"step {step}: the copies of the weights differ between ranks, which no code here causes: {who}. They "
                f"were equal {STEPS} steps before, so hardware has computed or stored something wrong. Return to a "
                f"checkpoint of step {step - STEPS} or before (`restore`), and start again without that machine."
            )
            rank = next(rank for rank, (value, _) in enumerate(checksums) if value != usual)
            error.at_fault = (rank, checksums[rank][1]) if times > len(checksums) / 2 else None
            raise error
        self._odd = True
        if this_rank() == 0:
            print(
                f"warning: step {step}: the copies of the weights are not equal: {who}. They have differed since the "
                "start, perhaps because the machines have different processors; they are not compared again.",
                file=sys.stderr,
                flush=True,
            )
