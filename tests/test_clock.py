"""When the held-out text is measured: often enough for a curve, exact across restarts, and not expensive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modernbert_train.__main__ import read_run
from modernbert_train.clock import VALIDATIONS, Clock, validations_in
from modernbert_train.config.schema import RunConfig
from tests.support.tiny_run import TinyRun

LONG = ("phases.short.tokens=400_000", "phases.long.tokens=200_000")


def walked(config: RunConfig, held_out: int, step: int, start: int = 0) -> list[int]:
    """Tokens at which a run of equal steps is validated."""
    ends = range(start + step, config.total_tokens + step, step)
    return [end for end in ends if Clock.of(config).validates(config.eval, held_out, end - step, end)]


def test_each_phase_is_validated_evenly_without_a_word_in_the_configuration(tiny_run: TinyRun) -> None:
    """One figure at the end of a phase tells too late that a run has gone wrong, and is no curve."""
    config = read_run(tiny_run(*LONG))
    found = walked(config, 583, step=100)
    assert 10 <= VALIDATIONS <= 20
    assert [sum(t <= 400_000 for t in found), sum(t > 400_000 for t in found)] == [VALIDATIONS, VALIDATIONS]
    gaps = [b - a for a, b in zip([0, *found], found, strict=False) if b <= 400_000]
    assert max(gaps) - min(gaps) <= 100 and found[VALIDATIONS - 1] == 400_000 and found[-1] == 600_000


@pytest.mark.runs
@pytest.mark.parametrize("step", [70, 997, 30_000])
def test_where_a_run_is_stopped_changes_no_validation(tiny_run: TinyRun, step: int) -> None:
    """For any batch, also where it overshoots a phase's end: due work depends on the clock alone."""
    config = read_run(tiny_run(*LONG))
    whole = walked(config, 583, step)
    for stopped in (step * 3, 400_000 // step * step, 500_000 // step * step):
        assert walked(config, 583, step, start=stopped) == [tokens for tokens in whole if tokens > stopped]


def test_unrequested_features_cost_at_most_a_twentieth(tiny_run: TinyRun) -> None:
    """A short run over much held-out text would else spend most of its time on it; the end of a phase always counts."""
    config = read_run(tiny_run(*LONG))
    phase = config.phases["short"]
    for held_out in (100, 4_000, 4_001, 20_000, 50_000):
        times = validations_in(phase, config.eval, held_out)
        assert times * held_out / 3 <= phase.tokens / 20
        assert times == VALIDATIONS or (times + 1) * held_out / 3 > phase.tokens / 20
    assert validations_in(phase, config.eval, 10**9) == 1
    assert walked(config, 10**9, step=100) == [400_000, 600_000]


def test_a_request_is_honoured_whatever_it_costs(tiny_run: TinyRun) -> None:
    config = read_run(tiny_run(*LONG))
    often = replace(config, eval=replace(config.eval, times_per_phase=40))
    assert len(walked(often, 10**9, step=100)) == 80
    by_interval = replace(config, eval=replace(config.eval, interval_tokens=150_000))
    assert walked(by_interval, 1, step=100) == [150_000, 300_000, 400_000, 450_000, 600_000]
