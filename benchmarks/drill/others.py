"""A second job on the folder, wrong clocks, and losses that are not numbers."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

from benchmarks.drill import warm
from benchmarks.drill.killed import anywhere
from benchmarks.drill.lab import Lab, Outcome, Round, clock_off, hooks, kill, slow_steps


def two_jobs(host: str | None) -> Round:
    """Repeat the command while the run trains; the first must not be affected."""

    def round(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
        outcomes = []
        for _ in range(number):
            run = lab.run()
            first = run.start(hook=partial(slow_steps, 0.3))
            first.until(lambda: len(run.records()) >= 1 + draw.randrange(3))  # noqa: B023
            second = run.finish(hook=partial(warm.another_host, host) if host else lambda: None)
            problem = second.wrong(78) or ("" if "in use by process" in second.said else second.said[-300:])
            problem = problem or first.wait().wrong(0) or run.differs(lab.reference()) or run.left()
            what = "the same command again" + (f" on a host called {host}" if host else "")
            outcomes.append(Outcome(what, "lost" if problem else "refused", problem))
            kill(first.pid)
            lab.wait_until_gone()
            lab.remove(run)
        return outcomes

    return round


def clocks(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Kill, and restart with a clock that is set back, or forward, or jumps during training."""
    outcomes = []
    for _ in range(number):
        run = lab.run()
        trainer = run.start(hook=slow_steps)
        anywhere(run, trainer, draw)
        kill(trainer.pid)
        trainer.wait()
        off = draw.choice([-60, -86_400, -20 * 365 * 86_400, 86_400, 20 * 365 * 86_400])
        after = draw.choice([0.0, 1.5])
        ended = run.finish(hook=hooks(slow_steps, partial(clock_off, off, after)))
        problem = ended.wrong(0) or run.differs(lab.reference())
        what = f"clock {off:+,} s, {f'after {after} s' if after else 'from the start'}"
        outcomes.append(Outcome(what, "lost" if problem else "survived", problem))
        lab.remove(run)
    return outcomes


def not_finite(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Make the loss of one rank of two NaN once: both must stop at that step, and the same command continues."""
    outcomes = []
    for _ in range(number):
        run, step, rank = lab.run(2), 2 + draw.randrange(20), draw.randrange(2)
        value = draw.choice([float("nan"), float("inf")])
        ended = run.finish(hook=partial(spoil, step, rank, value))
        problem = ended.wrong(70)
        if not problem and (f"step {step}" not in ended.said or f"rank {rank}" not in ended.said):
            problem = f"step or rank not named: {ended.said[-300:]}"
        problem = problem or run.settle()
        what = f"loss {value} at step {step} of rank {rank}"
        outcomes.append(Outcome(what, "lost" if problem else "survived", problem))
        lab.wait_until_gone()
        lab.remove(run)
    return outcomes


def spoil(step: int, rank: int, value: float) -> None:
    """Hook: replace the loss of a step on a rank."""
    from modernbert_train.train.adapters import ComposerObjective
    from modernbert_train.train.step import Loop

    real_start, real_forward, now = Loop.set_clock, ComposerObjective.forward, [0]

    def set_clock(self: Any, plan: Any) -> None:
        now[0] = self.state.timestamp.batch.value + 1
        real_start(self, plan)

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        output = real_forward(self, *arguments, **named)
        if now[0] != step or os.environ.get("RANK", "0") != str(rank):
            return output
        return output._replace(losses={term: total * value for term, total in output.losses.items()})

    Loop.set_clock = set_clock  # type: ignore[method-assign]
    ComposerObjective.forward = forward  # type: ignore[method-assign]
