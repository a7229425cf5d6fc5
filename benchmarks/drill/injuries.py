"""What a run may meet, a row for each kind: how often in the whole drill and in its short form, and how it is done.

An injury is drawn from the seed, its kind and the number of its round alone, so that a round can be repeated. A round
injures one run several times where that is possible, since a start is what costs most.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.drill import warm
from benchmarks.drill.lab import (
    STEP,
    STOPS,
    Lab,
    Outcome,
    Run,
    Trainer,
    clock_off,
    hooks,
    kill,
    slow_saves,
    slow_steps,
)
from benchmarks.drill.warm import Hook

Round = Callable[[Lab, random.Random, int], list[Outcome]]
Strike = Callable[[Run, Trainer, random.Random], str | None]  # what was done; None if the run ended before
WORKERS = "data.num_workers=2"


@dataclass(frozen=True)
class Injury:
    """A kind of injury.

    Attributes:
        name: for --only.
        what: for the table.
        count, quick: how many there are in the whole drill, and in its short form.
        at_a_time: in a round.
        round: does a round of so many and says what became of each.
    """

    name: str
    what: str
    count: int
    quick: int
    at_a_time: int
    round: Round


# --- killed processes and signals ---


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
    """A run that is struck at each of its starts, and at last let go to its end."""
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
            what = None  # it came to a process that had done its work; whether it had is compared below
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
    """Wait for a moment between the start and the end; returns which, or None if the run has ended by then."""
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
    """What stands among the checkpoints and is none yet."""
    try:
        found = list(run.checkpoints.iterdir())
    except FileNotFoundError:
        return set()
    return {path.name for path in found if not STEP.fullmatch(path.name)}


def kill_at(moment: Strike, victim: str) -> Strike:
    def strike(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
        when = moment(run, trainer, draw)
        if when is None:
            return None
        found = {"launcher": [trainer.pid], "rank": trainer.ranks(), "worker": trainer.workers()}[victim]
        if not found:  # none is there yet
            trainer.until(lambda: trainer.workers() if victim == "worker" else trainer.ranks())
            found = trainer.workers() if victim == "worker" else trainer.ranks()
        if not found or not kill(draw.choice(found)):
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
        codes = (70, 0)  # the last ones have nothing to deliver any more

    def round(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
        return chain(lab, draw, number, kill_at(moment, victim), codes, *words, ranks=ranks, hook=hook)

    return round


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
    """SIGSTOP for ever to a rank of two, or to a data worker."""
    outcomes = []
    for _ in range(number):
        worker = draw.random() < 0.5
        victim, codes = ("worker", (70, 0)) if worker else ("rank", (124,))

        def strike(run: Run, trainer: Trainer, draw: random.Random, victim: str = victim) -> str | None:
            trainer.until(lambda: "training the first batch" in trainer.said())
            deadline = time.monotonic() + 0.5 * draw.random()
            trainer.until(lambda: time.monotonic() > deadline)
            found = trainer.workers() if victim == "worker" else trainer.ranks()
            if not found or not kill(draw.choice(found), signal.SIGSTOP):
                return None
            return f"SIGSTOP of a {victim}"

        words, ranks = ((WORKERS,), 1) if worker else ((), 2)
        outcomes += chain(lab, draw, 1, strike, codes, *words, ranks=ranks)
    return outcomes


def pause(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """SIGSTOP, and after a moment SIGCONT, of any process of a run on two ranks."""

    def strike(run: Run, trainer: Trainer, draw: random.Random) -> str | None:
        when = anywhere(run, trainer, draw)
        found = [trainer.pid, *trainer.ranks()]
        victim, seconds = draw.choice(found), 2 * draw.random()
        if when is None or not kill(victim, signal.SIGSTOP):
            return None
        time.sleep(seconds)
        kill(victim, signal.SIGCONT)
        return f"{'launcher' if victim == trainer.pid else 'rank'} stopped for {seconds:.1f} s, {when}"

    return chain(lab, draw, number, strike, (0,), ranks=2)


# --- damaged files ---


def damage(harm: Callable[[Path, random.Random], str], files: str = "*") -> Round:
    """All but the two oldest checkpoints are harmed, each in a file of its own; a start has to pass over every one."""

    def round(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
        run = lab.stopped()
        folders = sorted(run.checkpoints.iterdir())[2:][-number:]
        done = {}
        for folder in folders:
            path = draw.choice(sorted(path for path in folder.glob(files) if path.is_file()))
            done[folder.name] = f"{path.name} of {folder.name}: {harm(path, draw)}"
        ended = run.finish()
        problem = ended.wrong(0) or lab.wait_until_gone() or run.differs(lab.reference())
        passed = {
            name for name in done for line in ended.said.splitlines() if "passed over" in line and f"{name}" in line
        }
        outcomes = []
        for name, what in done.items():
            if problem:
                outcomes.append(Outcome(what, "lost", f"one of {len(done)}: {problem}"))
            elif name in passed:
                outcomes.append(Outcome(what, "survived"))
            elif name > min(passed, default=""):  # newer ones are looked at first: this one was believed
                outcomes.append(Outcome(what, "survived", "not noticed, and made no difference"))
        if not problem:
            lab.remove(run)
        return outcomes

    return round


def flip_bit(path: Path, draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} flipped"


def truncate(path: Path, draw: random.Random) -> str:
    size = path.stat().st_size
    left = draw.choice([0, 1, size // 4, size // 2, size * 99 // 100, size - 1])
    os.truncate(path, left)
    return f"cut to {left} of {size} bytes"


HARDLY_JSON = {
    "100,000 brackets": "[" * 100_000,
    "nested 100,000 deep": '{"files": ' * 100_000 + "1" + "}" * 100_000,
    "infinite": '{"step": Infinity, "schema": NaN}',
    "empty": "",
    "zeros": "\0" * 4096,
    "a list": "[]",
    "a huge number": '{"step": ' + "9" * 10_000 + "}",
}
VALUES: list[Any] = [None, True, -1, 1e308, 10**30, "", "../../../../etc/passwd", "/etc/passwd", "\0", [], {}]


def edit_json(path: Path, draw: random.Random) -> str:
    """One value or key anywhere in it exchanged, or all of it."""
    if draw.random() < 0.3:
        name = draw.choice(list(HARDLY_JSON))
        path.write_text(HARDLY_JSON[name])
        return name
    tree = json.loads(path.read_text())
    places = [(node, key) for node in nodes(tree) for key in (node if isinstance(node, dict) else range(len(node)))]
    node, key = draw.choice(places)
    if isinstance(node, dict) and draw.random() < 0.3:
        name = draw.choice(["../../../../etc/passwd", "/dev/zero", "a" * 5000, "", "."])
        node[name] = node.pop(key)
        what = f"key {key} called {name[:30]!r}"
    else:
        value = draw.choice([*VALUES, float("inf"), float("nan")])
        what = f"{key}: {value!r}"
        node[key] = value
    path.write_text(json.dumps(tree))
    return what


def nodes(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list) and tree:
        yield tree
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from nodes(each)


def remove(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "removed"


def nothing_whole(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """Every checkpoint is damaged: the run must say so, and not begin at 0."""
    outcomes = []
    for _ in range(number):
        run = lab.stopped()
        for folder in run.checkpoints.iterdir():
            flip_bit(draw.choice(sorted(folder.iterdir())), draw)
        ended = run.finish()
        problem = ended.wrong(74) or ("" if "no checkpoint is whole" in ended.said else ended.said[-300:])
        outcomes.append(Outcome("all checkpoints damaged", "lost" if problem else "refused", problem))
        lab.remove(run)
    return outcomes


# --- disks ---


@contextmanager
def disk(lab: Lab, megabytes: int = 64) -> Iterator[Path]:
    """A disk of its own, in memory; raises OSError if there can be none here."""
    place = lab.folder / "disk"
    place.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m", "drill", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(done.stderr.strip())


def full_disk(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """The disk is full after so many bytes; then there is room, and the command is given again."""
    outcomes: list[Outcome] = []
    for _ in range(number):
        try:
            with disk(lab) as place:
                run = lab.run(under=place)
                run.folder.parent.mkdir(parents=True)
                room = draw.randrange(1 << 18)
                ballast = place / "ballast"
                with ballast.open("wb") as file:
                    status = os.statvfs(place)
                    os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - room))
                ended = run.finish()
                left = sorted(partial_of(run))
                ballast.unlink()
                problem = ended.wrong(74, 0) or (f"partial files stay: {left}" if left else "") or run.settle()
                if ended.code == 74 or problem:
                    what = f"disk full after {room:,} bytes"
                    outcomes.append(Outcome(what, "lost" if problem else "survived", problem))
        except OSError as error:
            return [Outcome("disk full", "skipped", f"no disk of its own here: {error}")]
    return outcomes


def read_only(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """The disk is read-only at the start, or the folder of checkpoints becomes so between two saves."""
    outcomes = []
    for _ in range(number):
        try:
            with disk(lab) as place:
                run = lab.run(under=place)
                if during := draw.random() < 0.7:
                    run.checkpoints.mkdir(parents=True)
                    _mount("--bind", str(run.checkpoints), str(run.checkpoints))
                    trainer = run.start(hook=partial(slow_steps, 0.1))
                    steps = 1 + draw.randrange(20)
                    trainer.until(lambda: len(run.records()) >= steps)  # noqa: B023
                    what = f"checkpoints read-only after {steps} steps"
                    if not _becomes_read_only(run.checkpoints, trainer):
                        trainer.wait()
                        continue
                    ended = trainer.wait()
                    _mount("-o", "remount,rw,bind", str(run.checkpoints))
                else:
                    what = "the disk read-only before the start"
                    _mount("-o", "remount,ro", str(place))
                    ended = run.finish()
                    _mount("-o", "remount,rw", str(place))
                problem = ended.wrong(74) or run.settle()
                outcomes.append(Outcome(what, "lost" if problem else "survived", problem))
                if during:
                    subprocess.run(["umount", "-l", str(run.checkpoints)], check=False, capture_output=True)
        except OSError as error:
            return [*outcomes, Outcome("read-only", "skipped", f"cannot be done here: {error}")]
    return outcomes


def _becomes_read_only(folder: Path, trainer: Trainer) -> bool:
    """The kernel refuses as long as a file there is open for writing; False if the run ends first."""
    done = False

    def tried() -> bool:
        nonlocal done
        words = ["mount", "-o", "remount,ro,bind", str(folder)]
        done = subprocess.run(words, capture_output=True).returncode == 0
        return done

    return trainer.until(tried) and done


# --- others ---


def two_jobs(host: str | None) -> Round:
    """The same command again while the run trains; the first must not notice."""

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
    """Killed, and started again with a clock that is set back, or forward, or jumps while it trains."""
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
    """The loss of one rank of two is NaN once: both must stop at that step, and the same command goes on."""
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
    """A hook: the loss of a step on a rank."""
    from modernbert_train.train.adapters import ComposerObjective
    from modernbert_train.train.callbacks import SetClock

    real_start, real_forward, now = SetClock.batch_start, ComposerObjective.forward, [0]

    def batch_start(self: Any, state: Any, logger: Any) -> None:
        now[0] = state.timestamp.batch.value + 1
        real_start(self, state, logger)

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        found = real_forward(self, *given, **named)
        if now[0] != step or os.environ.get("RANK", "0") != str(rank):
            return found
        return found._replace(losses={term: total * value for term, total in found.losses.items()})

    SetClock.batch_start = batch_start  # type: ignore[method-assign]
    ComposerObjective.forward = forward  # type: ignore[method-assign]


def data_faults(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """A file of the data is harmed while the run trains; then it is restored, and the command given again."""
    outcomes = []
    for _ in range(number):
        copy = lab.folder / "harmed"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(lab.data / "train", copy)
        run = lab.run(1, f"data.train={copy}", draw.choice([WORKERS, "data.num_workers=0"]))
        harm = draw.choice([flip_bit, truncate, remove])
        trainer = run.start(hook=slow_steps)
        anywhere(run, trainer, draw)
        path = draw.choice(sorted(copy.iterdir()))
        what = f"{path.name}: {harm(path, draw)}"
        ended = trainer.wait()
        shutil.rmtree(copy)
        shutil.copytree(lab.data / "train", copy)
        problem = ended.wrong(0, 65, 74, 78) or lab.wait_until_gone() or run.settle()
        said = f"code {ended.code}"
        outcomes.append(Outcome(what, "lost" if problem else "survived", problem or said))
        lab.remove(run)
    return outcomes


LEGS = ((4, "ddp"), (2, "fsdp2"), (1, "ddp"), (4, "hsdp"))
CLOSE = 1e-4  # relative, of losses: sums are rounded in another order


def elastic(lab: Lab, draw: random.Random, number: int) -> list[Outcome]:
    """4 ranks of DDP, 2 of FSDP2, 1, 4 of HSDP, each killed on its way; the same batches, losses within rounding."""
    outcomes = []
    for _ in range(number):
        run, struck = lab.run(), list[str]()
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
    """What differs by more than rounding from the run on one rank."""
    mine, expected = run.records(), lab.reference().records
    exact = ("step", "tokens", "phase", "rows", "predicted", "lr")
    if [[each[key] for key in exact] for each in mine] != [[each[key] for key in exact] for each in expected]:
        return "other batches"
    worst = max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(mine, expected, strict=True))
    return f"losses differ by {worst:.1e}" if worst > CLOSE else run.left()


INJURIES = {
    each.name: each
    for each in (
        Injury("kill", "kill -9 of the only rank", 60, 3, 6, kills(anywhere, "rank", 1)),
        Injury("kill-save", "kill -9 of the only rank inside a save", 40, 3, 6, kills(inside_save, "rank", 1)),
        Injury("kill-worker", "kill -9 of a data worker", 20, 1, 4, kills(anywhere, "worker", 1)),
        Injury("kill-launcher-2", "kill -9 of the launcher of two ranks", 25, 1, 5, kills(anywhere, "launcher", 2)),
        Injury("kill-rank-2", "kill -9 of a rank of two", 25, 1, 5, kills(anywhere, "rank", 2)),
        Injury("kill-worker-2", "kill -9 of a data worker of two ranks", 10, 0, 5, kills(anywhere, "worker", 2)),
        Injury("kill-save-2", "kill -9 of a rank of two inside a save", 20, 1, 5, kills(inside_save, "rank", 2)),
        Injury("truncate", "a file of a checkpoint cut at one of six places", 60, 5, 9, damage(truncate)),
        Injury("flip", "a bit flipped in a checkpoint", 500, 5, 9, damage(flip_bit)),
        Injury("manifest", "a manifest edited, nested, infinite", 60, 5, 9, damage(edit_json, "MANIFEST*")),
        Injury("json", "another JSON file of a checkpoint edited", 30, 0, 9, damage(edit_json, "[!M]*.json")),
        Injury("remove", "a file of a checkpoint removed", 18, 0, 9, damage(remove)),
        Injury("nothing-whole", "all checkpoints damaged", 4, 1, 1, nothing_whole),
        Injury("full-disk", "the disk full at a random byte", 50, 2, 5, full_disk),
        Injury("read-only", "the disk read-only, before and during the run", 10, 1, 2, read_only),
        Injury("signal", "SIGTERM, SIGINT, SIGUSR1 from the start on", 100, 4, 5, signals(1)),
        Injury("signal-2", "the same to the launcher or a rank of two", 50, 1, 5, signals(2)),
        Injury("freeze", "SIGSTOP of a rank or a data worker", 10, 1, 2, freeze),
        Injury("pause", "SIGSTOP, then SIGCONT", 10, 0, 5, pause),
        Injury("two-jobs", "two jobs on one folder", 6, 1, 2, two_jobs(None)),
        Injury("two-hosts", "the same from a host of another name", 4, 0, 2, two_jobs("another-host")),
        Injury("clock", "the clock set back or forward", 15, 1, 3, clocks),
        Injury("nan", "NaN or infinity on one rank of two", 15, 1, 3, not_finite),
        Injury("data", "a file of the data harmed while it trains", 30, 2, 5, data_faults),
        Injury("elastic", "4, 2, 1, 4 ranks by DDP, FSDP2, HSDP, killed between", 16, 0, 4, elastic),
    )
}
