"""Which candidate wins. If this breaks, `tune` writes down settings that are slower than those there were."""

from __future__ import annotations

from modernbert_train.train.tune.process import Failure
from modernbert_train.train.tune.search import FIRST_TURNS, PAYS, Visit, gain, halve, paired


def visits(rates: list[float | Failure], seen: list[int] | None = None) -> Visit:
    def visit(number: int, turn: str, steps: int) -> list[float]:
        if seen is not None:
            seen.append(number)
        rate = rates[number]
        if isinstance(rate, Failure):
            raise rate
        return [rate] * steps

    return visit


def test_the_better_half_is_left_until_one_is() -> None:
    seen: list[int] = []
    best, timed = halve(4, visits([10, 30, 20, 5], seen), 2, together=True)
    assert best == 1
    assert [each.rounds for each in timed] == [1, 2, 2, 1]
    assert seen.count(3) == FIRST_TURNS and seen.count(1) == 3 * FIRST_TURNS
    assert seen[:8] == [0, 1, 2, 3, 3, 2, 1, 0], "a busy moment must not hit the same candidate every time"


def test_a_longer_turn_takes_the_place_of_turns_that_would_start_processes_anew() -> None:
    steps: list[int] = []
    rates = visits([1.0, 2.0])

    def visit(number: int, turn: str, count: int) -> list[float]:
        steps.append(count)
        return rates(number, turn, count)

    assert halve(2, visit, 3, together=False)[0] == 1
    assert steps == [3 * FIRST_TURNS] * 2


def test_what_does_not_pay_is_not_taken() -> None:
    """A per cent of noise must not turn a switch on."""
    assert halve(2, visits([100.0, 100.0 * PAYS - 1]), 1, together=True)[0] == 0
    assert halve(2, visits([100.0, 100.0 * PAYS + 1]), 1, together=True)[0] == 1


def test_one_that_fails_is_given_up_and_the_others_go_on() -> None:
    full = Failure("no memory", full=True)
    best, timed = halve(3, visits([10.0, full, 20.0]), 1, together=True)
    assert best == 2 and timed[1].failure is full and timed[1].rates == []
    assert halve(2, visits([full, 5.0]), 1, together=True)[0] == 1, "what there was fails, and anything is better"
    assert halve(2, visits([full, full]), 1, together=True)[0] is None


def test_the_last_comparison_is_by_turns() -> None:
    """A machine that gets slower by the turn slows both: the ratio of each turn is what counts."""
    slow = iter([1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125])

    def visit(number: int, turn: str, steps: int) -> list[float]:
        return [(100.0, 120.0)[number] * next(slow)] * steps

    pair = paired(visit, 2, turns=4)
    assert [len(rates) for rates in pair] == [4, 4]
    assert abs(gain(pair) - 1.2) < 1e-9
