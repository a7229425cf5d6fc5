"""Candidates in turns: rounds of doubling length, after each of which the better half is left.

A turn takes some steps with every candidate, in one order and then in the other, so that a busy machine disturbs all
alike. Candidates are compared by the median over all of their steps. Where memory holds the models of all, their
processes stay; on a GPU there is one at a time, and a longer turn takes the place of more turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from modernbert_train.train.tune.process import Failure

PAYS = 1.02  # times the tokens a second of what there was: less is not worth a change
FIRST_TURNS = 4  # of the first round
PAIRED_TURNS = 8

# number of a candidate, name of the turn, steps -> tokens a second of each step
Visit = Callable[[int, str, int], list[float]]


@dataclass
class Timed:
    """What was measured of a candidate.

    Attributes:
        rates: tokens a second of each step.
        rounds: it took part in.
        failure: why it was given up.
    """

    rates: list[float] = field(default_factory=list)
    rounds: int = 0
    failure: Failure | None = None

    @property
    def rate(self) -> float:
        return median(self.rates) if self.rates else 0.0


def halve(count: int, visit: Visit, steps: int, *, together: bool) -> tuple[int | None, list[Timed]]:
    """Find the fastest of some candidates.

    Args:
        count: of candidates; the first is what there was before, and stays where no other pays.
        visit: takes steps with one of them.
        steps: of a turn.
        together: whether the processes of all stay.

    Returns:
        Its number, None where none could be timed; and what was measured of each.
    """
    found = [Timed() for _ in range(count)]
    alive, number = list(range(count)), 0
    while alive:
        turns, each = (FIRST_TURNS * 2**number, steps) if together else (1, FIRST_TURNS * steps * 2**number)
        for turn in range(turns):
            for candidate in alive if (number + turn) % 2 == 0 else reversed(alive):
                if found[candidate].failure is None:
                    try:
                        found[candidate].rates += visit(candidate, f"{number}.{turn}", each)
                    except Failure as failure:
                        found[candidate].failure = failure
        alive = [candidate for candidate in alive if found[candidate].failure is None]
        for candidate in alive:
            found[candidate].rounds += 1
        alive = sorted(alive, key=lambda candidate: -found[candidate].rate)[: (len(alive) + 1) // 2]
        number += 1
        if len(alive) == 1:
            break
    if not alive:
        return None, found
    best, before = alive[0], found[0]
    stays = before.failure is None and found[best].rate < PAYS * before.rate
    return (0 if stays else best), found


def paired(visit: Visit, steps: int, turns: int = PAIRED_TURNS) -> tuple[list[float], list[float]]:
    """Two candidates in turns: of each the median tokens a second of every turn.

    Raises:
        Failure: of one of them.
    """
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for candidate in (0, 1) if turn % 2 == 0 else (1, 0):
            rates[candidate].append(median(visit(candidate, f"pair.{turn}", steps)))
    return rates


def gain(pair: tuple[Sequence[float], Sequence[float]]) -> float:
    """How many times faster the second is: the median over turns."""
    return median(after / before for before, after in zip(*pair, strict=True))
