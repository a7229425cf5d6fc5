"""Faults that raise nothing: a rank that is slow, and a rank whose copy of the weights is no longer that of the others.

Both are told by numbers that ride in the one all-reduce of a step (step_numbers.py), under DDP. There a rank's time
from its first forward pass to its last one's end has no collective in it, so it is the rank's own; sharded, every layer
waits for the slowest. Every rank hears all times, and the slow one speaks for itself. A checksum c of the weights is
summed as c and c^2: N copies are equal if and only if N * sum(c^2) = sum(c)^2, exact in fp64 for 8,192 ranks.
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

SLOWER = 1.1  # times the median rank
STEPS = 100  # in a row, until a slow rank is named; and between two looks at the weights
_PRIME = (1 << 20) - 3  # so that a flip of any one bit changes the checksum


def checksum(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of fp32 weights a whole number below 2^20, as fp64 on their device, whatever the order of summation."""
    sums = [parameter.detach().view(torch.int32).sum() for parameter in parameters]
    return (torch.stack(sums).sum() % _PRIME).double()


class SilentFaults:
    """This rank's part; each step calls the methods in their order here.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []  # of the present step: its begin, and its end once it is there
        self._before: list[torch.cuda.Event | float] = []  # of the one before, which a GPU has long passed
        self._slow = self._steps = 0
        self._looked = self._agreed = self._odd = False
        self._checksum = torch.zeros((), dtype=torch.float64)

    def forward(self) -> None:
        """A microbatch goes forward; the first one of a step comes after what the ranks tell each other before it."""
        if len(self._marks) != 1:
            self._before, self._marks = self._marks, [self._now()]

    def last_loss(self) -> None:
        """Its last microbatch has gone forward."""
        self._marks.append(self._now())

    @torch.no_grad()
    def to_sum(self, parameters: Iterable[nn.Parameter], step: int) -> tuple[list[Tensor], list[float]]:
        """What is added up over the ranks: of the device, and of the host.

        Args:
            parameters: of the model, before the update.
            step: number of the step, from 1.
        """
        seconds = [0.0] * num_ranks()
        seconds[this_rank()] = self._own_seconds()
        self._looked = step % STEPS == 0
        if not self._looked:
            return [], seconds
        self._checksum = checksum(parameters)
        return [self._checksum, self._checksum * self._checksum], seconds

    def heard(self, checks: Sequence[float], seconds: Sequence[float], step: int) -> None:
        """Judge the sums.

        Raises:
            RunError: on every rank, if copies of the weights have parted; names the odd one.
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
        """Of the step before: nothing is waited for."""
        if len(self._before) < 2:
            return 0.0
        begin, end = self._before[0], self._before[-1]
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        return begin.elapsed_time(end) / 1000

    def _look_for_slow(self, seconds: Sequence[float]) -> None:
        usual, own = statistics.median(seconds), seconds[this_rank()]
        self._slow = self._slow + 1 if usual > 0 and own > SLOWER * usual else 0
        if self._slow == STEPS:  # once, unless it was as fast as the others in between
            print(
                f"warning: rank {this_rank()} on {socket.gethostname()} is slow: {own / usual:.2f} times the median of "
                f"all ranks in the last step, and more than {SLOWER:g} times in each of the last {STEPS}. All others "
                "wait for it. Look at the clocks, the temperature and the memory errors of its GPU (`nvidia-smi -q`), "
                "or at what else its machine does; start again without that machine if it stays so.",
                file=sys.stderr,
                flush=True,
            )

    def _compare(self, same: bool, step: int) -> None:
        if same:
            self._agreed = True
            return
        found = gather_from_all((float(self._checksum), socket.gethostname()))
        (usual, times), *_ = Counter(value for value, _ in found).most_common()
        odd = [f"rank {rank} on {host}" for rank, (value, host) in enumerate(found) if value != usual]
        who = ", ".join(odd[:8]) if times > len(found) / 2 else "no two halves of the ranks agree"
        if self._agreed:
            error = RunError(
                f"step {step}: the copies of the weights have parted, which nothing in this program does: {who}. "
                f"They were equal {STEPS} steps before, so hardware has computed or kept something wrong. Go back to a "
                f"checkpoint of step {step - STEPS} or before (`restore`), and start again without that machine."
            )
            rank = next(rank for rank, (value, _) in enumerate(found) if value != usual)
            error.at_fault = (rank, found[rank][1]) if times > len(found) / 2 else None
            raise error
        self._odd = True
        if this_rank() == 0:
            print(
                f"warning: step {step}: the copies of the weights are not equal: {who}. They have not been since the "
                "start, so perhaps the machines have different processors; they are not compared again.",
                file=sys.stderr,
                flush=True,
            )
