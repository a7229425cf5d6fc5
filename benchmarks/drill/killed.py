"""Processes killed or stopped at any moment of a run."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from functools import partial

from benchmarks.drill.lab import (
    STEP,
    STOPS,
    WIDE,
    WORKERS,
    Lab,
    Outcome,
    Round,
    Run,
    Strike,
    Trainer,
    hooks,
    kill,
    slow_saves,
    slow_steps,
)
from benchmarks.drill.warm import Hook


def chain(
    lab: Lab,
    draw: random.Random,
    number: int,
    strike: Strike,
    codes: tuple[int, ...],
    *overrides: str,
    ranks: int = 1,
    hook: Hook = slow_steps,
) -> list[Outcome]:
    """Run with an injury at each start, and finally without one to its end."""
    outcomes: list[Outcome] = []
    run, struck = lab.run(ranks, *overrides), list[str]()

    def close(problem: str) -> None:
        nonlocal run, struck
        verdict, detail = ("lost", f"the last of {len(struck)}: {problem}") if problem else ("survived", "")
        for what in struck or ["a start without an injury"] * bool(problem):
            outcomes.append(Outcome(what, verdict, detail))  # type: ignore[arg-type]
        if not problem:
            lab.remove(run)
        run, struck = lab.run(ranks, *overrides), []

    for _ in range(4 * number):
        if len(outcomes) + len(struck) >= number:
            break
        trainer = run.start(hook=hook)
        what = strike(run, trainer, draw)
        ended = trainer.wait()
        problem = lab.wait_until_gone()
        if what is not None and ended.code == 0 and 0 not in codes:
            what = None  # it hit a process that had finished; the comparison below tells whether that is true
        if what is not None:
            struck.append(what)
            unheard = ended.code < 0 and not run.folder.exists()  # before the program could listen to signals
            problem = problem or ("" if unheard else ended.wrong(*codes))
        else:
            problem = problem or ended.wrong(0)
        if problem:
            close(problem)
        elif ended.code == 0:
            close(run.differs(lab.reference(ranks, overrides)))
    if struck:
        close(run.settle())
    return outcomes


def anywhere(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
    """Wait for a moment between the start and the end; return its description, or None if the run has ended."""
    if draw.random() < 0.4:
        began, wait = "the start", 2.0 * draw.random()
    else:
        began, wait = "the first batch", 1.5 * draw.random()
        trainer.until(lambda: "training the first batch" in trainer.said())
    deadline = time.monotonic() + wait
    trainer.until(lambda: time.monotonic() > deadline)
    return f"{wait:.2f} s after {began}" if trainer.running() else None


def inside_save(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
    """Wait for a moment while a checkpoint is being written."""
    seen, wait = partial_of(run), 0.15 * draw.random()
    for _ in range(1 + draw.randrange(3)):
        before = frozenset(seen)
        trainer.until(lambda before=before: partial_of(run) - before)  # type: ignore[misc]
        seen |= partial_of(run)
    deadline = time.monotonic() + wait
    trainer.until(lambda: time.monotonic() > deadline)
    return f"{wait:.3f} s into a save" if trainer.running() else None


def partial_of(run: Run) -> set[str]:
    """Return the partial checkpoints, which are still being written."""
    try:
        folders = list(run.checkpoints.iterdir())
    except FileNotFoundError:
        return set()
    return {path.name for path in folders if not STEP.fullmatch(path.name)}


def kill_at(moment: Strike, victim: str) -> Strike:
    def strike(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
        when = moment(run, trainer, draw)
        if when is None:
            return None
        pids = {"launcher": [trainer.pid], "rank": trainer.ranks(), "worker": trainer.workers()}[victim]
        if not pids:  # none exists yet
            trainer.until(lambda: trainer.workers() if victim == "worker" else trainer.ranks())
            pids = trainer.workers() if victim == "worker" else trainer.ranks()
        if not pids or not kill(draw.choice(pids)):
            return None
        trainer.wait()
        over = ", which was over by then" if moment is inside_save and not partial_of(run) else ""
        return f"kill -9 of a {victim}, {when}{over}"

    return strike


def kills(moment: Strike, victim: str, ranks: int) -> Round:
    words = (WORKERS,) if victim == "worker" else ()
    hook = hooks(slow_steps, slow_saves) if moment is inside_save else slow_steps
    codes: tuple[int, ...] = (-9,) if victim == "launcher" or (ranks == 1 and victim == "rank") else (70,)
    if victim == "worker":
        codes = (70, 0)  # the last workers may have delivered all batches

    def round(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
        return chain(lab, draw, number, kill_at(moment, victim), codes, *words, ranks=ranks, hook=hook)

    return round


# ranks, and the words of their run; three ranks share batches differently than four
CUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (3, ("phases.short.batch_rows=6", "phases.short.microbatch_tokens=64", "phases.long.batch_rows=3")),
    (4, ("phases.short.microbatch_tokens=64",)),
    (4, ("distributed.strategy=fsdp2",)),
    (4, ("distributed.strategy=hsdp", "distributed.shard_ranks=2")),
)


def kills_of_many(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Kill -9 a rank of three or four; the first step after a start must sum like all others."""
    ranks, words = draw.choice(CUTS)
    outcomes = chain(lab, draw, number, kill_at(anywhere, "rank"), (70,), *words, ranks=ranks)
    return [replace(outcome, what=f"{outcome.what}; {ranks} ranks, {' '.join(words)}") for outcome in outcomes]


def signals(ranks: int) -> Round:
    def strike(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
        when, number = anywhere(run, trainer, draw), draw.choice(STOPS)
        victim = draw.choice([trainer.pid, *trainer.ranks()])
        if when is None or not kill(victim, number):
            return None
        return f"{number.name} to a {'launcher' if ranks > 1 and victim == trainer.pid else 'rank'}, {when}"

    def round(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
        return chain(lab, draw, number, strike, (75, 0), ranks=ranks)

    return round


def freeze(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """SIGSTOP a rank of two, or a data worker, forever."""
    outcomes = []
    for _ in range(number):
        worker = draw.random() < 0.5
        victim, codes = ("worker", (70, 0)) if worker else ("rank", (124,))

        def strike(run: Run, trainer: Trainer, draw: random.Random, victim: str = victim) -> str | None:
            trainer.until(lambda: "training the first batch" in trainer.said())
            deadline = time.monotonic() + 0.5 * draw.random()
            trainer.until(lambda: time.monotonic() > deadline)
            pids = trainer.workers() if victim == "worker" else trainer.ranks()
            if not pids or not kill(draw.choice(pids), signal.SIGSTOP):
                return None
            return f"SIGSTOP of a {victim}"

        words, ranks = ((WORKERS,), 1) if worker else ((), 2)
        outcomes += chain(lab, draw, 1, strike, codes, *words, ranks=ranks)
    return outcomes


def pause(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """SIGSTOP, and after a moment SIGCONT, any process of a run on two ranks."""

    def strike(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
        when = anywhere(run, trainer, draw)
        pids = [trainer.pid, *trainer.ranks()]
        victim, seconds = draw.choice(pids), 2 * draw.random()
        if when is None or not kill(victim, signal.SIGSTOP):
            return None
        time.sleep(seconds)
        kill(victim, signal.SIGCONT)
        return f"{'launcher' if victim == trainer.pid else 'rank'} stopped for {seconds:.1f} s, {when}"

    return chain(lab, draw, number, strike, (0,), ranks=2)


LEGS = ((4, "ddp"), (2, "fsdp2"), (1, "ddp"), (4, "hsdp"))
CLOSE = 1e-4  # relative, of losses: sums are rounded in another order


def elastic(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Train on 4 ranks (DDP), 2 (FSDP2), 1 and 4 (HSDP), killed between; batches must agree, losses within rounding."""
    outcomes = []
    for _ in range(number):
        run, struck = lab.run(1, *WIDE), list[str]()
        problem = ""
        for ranks, strategy in LEGS:
            before = len(run.records())
            more = (f"distributed.strategy={strategy}", *(("distributed.shard_ranks=2",) if strategy == "hsdp" else ()))
            trainer = run.start(hook=partial(slow_steps, 0.1), ranks=ranks, more=more)
            steps = before + 2 + draw.randrange(4)
            trainer.until(lambda: len(run.records()) >= steps)  # noqa: B023
            victim = draw.choice(trainer.ranks()) if trainer.running() and trainer.ranks() else trainer.pid
            struck.append(f"kill -9 of a rank of {ranks}, {strategy}, after step {steps}")
            kill(victim)
            ended = trainer.wait()
            problem = problem or lab.wait_until_gone() or ended.wrong(-9 if ranks == 1 else 70)
            if problem:
                break
        problem = problem or run.finish().wrong(0) or unlike(run, lab)
        outcomes += [Outcome(what, "lost" if problem else "survived", problem) for what in struck]
        if not problem:
            lab.remove(run)
    return outcomes


def unlike(run: Run, lab: Lab) -> str:
    """Return the differences beyond rounding from the run on one rank."""
    mine, expected = run.records(), lab.reference(run.ranks, run.overrides).records
    exact = ("step", "tokens", "phase", "rows", "predicted", "lr")
    if [[each[key] for key in exact] for each in mine] != [[each[key] for key in exact] for each in expected]:
        return "other batches"
    worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(mine, expected, strict=True))
    return f"losses differ by {worst:.1e}" if worst > CLOSE else run.left()
