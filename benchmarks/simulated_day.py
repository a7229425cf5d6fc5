"""A day of a run that nobody attends, compressed into minutes: how much of it is training that counts?

    python -m benchmarks.simulated_day --out day                  # in 4 minutes
    python -m benchmarks.simulated_day --out day --svg day.svg

A supervisor gives one command again and again, as a scheduler's requeue does, and knows nothing else. Meanwhile the day
goes by its schedule: a preemption every two hours, kill -9 every four, a shard that is damaged until its owner restores
it, a disk that is full until somebody frees it, and a store that is slow for an hour. Two figures come out. The raw one
is the time of the steps that count, over the time of the compressed day, in which starting costs as many real seconds
as ever. The other is for a real day: what was counted (starts, steps lost, time shut out) at the cost it has in one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.drill import warm
from benchmarks.drill.damaged import flip_bit
from benchmarks.drill.disks import disk
from benchmarks.drill.lab import Lab, Trainer, hooks, kill, slow_steps

DAY = 86_400.0
INTERVAL = 180.0  # seconds of a real day between two checkpoints
STEP_SECONDS = 0.1  # of the compressed run
HOURS = 3600.0
COLOURS = {"training": "#3a7d44", "lost": "#c8553d", "starting": "#d9a441", "shut out": "#8a8a8a"}


@dataclass(frozen=True)
class Event:
    """What happens, at which second of a real day and for how long."""

    at: float
    what: str
    lasts: float = 0.0


SCHEDULE = (
    *(Event((2 * n + 1) * HOURS, "preemption") for n in range(12)),
    *(Event((4 * n + 2.3) * HOURS, "kill -9") for n in range(6)),
    Event(7.6 * HOURS, "damaged shard", 600),
    Event(13.4 * HOURS, "full disk", 600),
    Event(17.5 * HOURS, "slow store", 3600),
)


@dataclass
class Start:
    """One start of the command: times of the compressed day in seconds, and steps.

    Attributes:
        began, ended: when.
        code: how it ended.
        first, last: when its first and last steps were done; None if it did none.
        steps: numbers of its first and last step.
    """

    began: float
    ended: float = 0.0
    code: int = 0
    first: float | None = None
    last: float | None = None
    steps: tuple[int, int] = (0, -1)


@dataclass
class Day:
    """What was seen."""

    seconds: float
    starts: list[Start] = field(default_factory=list)
    counted: float = 0.0  # seconds of the steps of the final record
    steps: int = 0
    lost_steps: int = 0

    def raw(self) -> float:
        return self.counted / self.seconds

    def shut_out(self) -> float:
        """Share of the day from a start that failed without a step to the next one."""
        pairs = zip(self.starts, [*self.starts[1:], None], strict=True)
        gaps = [(after.began if after else self.seconds) - one.began for one, after in pairs if one.first is None]
        return sum(gaps) / self.seconds

    def real(self, start_seconds: float, blocked_seconds: float) -> float:
        """Share of a real day, see docs/faults.md."""
        trained = sum(start.first is not None for start in self.starts)
        lost = self.lost_steps * STEP_SECONDS / self.seconds * DAY
        saves = DAY / INTERVAL * blocked_seconds
        return 1 - (trained * start_seconds + lost + saves + self.shut_out() * DAY) / DAY


def slow_store(flag: Path) -> None:
    """A hook: while the file is there, reading a shard takes half a second."""
    from modernbert_train.data.mds import TokenShards

    real = TokenShards._read_file

    def read(self: TokenShards, shard: int) -> bytes:
        if flag.exists():
            time.sleep(0.5)
        return real(self, shard)

    TokenShards._read_file = read  # type: ignore[method-assign]


def live(lab: Lab, seconds: float) -> Day:
    """The day, second by second; raises OSError where there can be no disk of its own."""
    with disk(lab) as place:
        return _live(lab, seconds, place)


def _live(lab: Lab, seconds: float, place: Path) -> Day:
    copy, flag = lab.folder / "shards", lab.folder / "slow"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(lab.data / "train", copy)
    steps = max(1, round(INTERVAL / DAY * seconds / STEP_SECONDS))
    words = (f"data.train={copy}", "phases.short.tokens=100_000_000", f"checkpoint.interval_steps={steps}")
    run = lab.run(1, *words, under=place)
    day, draw, scale = Day(seconds), lab.draw("day"), seconds / DAY
    ahead = sorted(SCHEDULE, key=lambda event: event.at)
    heal: list[tuple[float, str]] = []
    began, trainer, failed = time.monotonic(), None, 0.0

    def now() -> float:
        return time.monotonic() - began

    def look(start: Start) -> None:
        done = run.records()
        if done and done[-1]["step"] > start.steps[1] and done[-1]["step"] != seen:
            start.first = start.first or now()
            start.last, start.steps = now(), (start.steps[0] or done[-1]["step"], done[-1]["step"])

    seen, newest = 0, 0
    while now() < seconds:
        if trainer is None and now() > failed:
            seen = run.records()[-1]["step"] if run.records() else 0
            trainer = run.start(hook=hooks(partial(slow_steps, STEP_SECONDS), partial(slow_store, flag)))
            day.starts.append(Start(now()))
        if trainer is not None:
            look(day.starts[-1])
            newest = max(newest, day.starts[-1].steps[1])
            if not trainer.running():
                ended = trainer.wait()
                start = day.starts[-1]
                start.ended, start.code = now(), ended.code
                print(f"{now() / scale / HOURS:5.1f} h  ended with {ended.code}", flush=True)
                failed = now() + (0.0 if start.first is not None else 60 * scale)  # a minute before it is tried again
                trainer = None
        while heal and heal[0][0] <= now():
            _heal(heal.pop(0)[1], lab, copy, flag, place)
        while ahead and ahead[0].at * scale <= now():
            event = ahead.pop(0)
            print(f"{event.at / HOURS:5.1f} h  {event.what}", flush=True)
            _happen(event, trainer, copy, flag, place, draw.choice(sorted(copy.glob("shard*"))), lab)
            if event.lasts:
                heal.append((now() + event.lasts * scale, event.what))
        time.sleep(0.01)
    if trainer is not None:
        kill(trainer.pid, signal.SIGTERM)
        day.starts[-1].code = trainer.wait().code
        day.starts[-1].ended = now()
    day.seconds = now()
    final = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    done = [entry for entry in final if entry["kind"] == "step"]
    day.counted, day.steps = sum(entry["seconds"] for entry in done), len(done)
    resumed = [entry["step"] for entry in final if entry["kind"] == "resume"]
    ends = [start.steps[1] for start in day.starts if start.first is not None]
    day.lost_steps = sum(max(0, end - again) for end, again in zip(ends, resumed, strict=False))
    return day


def _happen(event: Event, trainer: Trainer | None, copy: Path, flag: Path, place: Path, shard: Path, lab: Lab) -> None:
    if event.what in ("preemption", "kill -9") and trainer is not None:
        kill(trainer.pid, signal.SIGTERM if event.what == "preemption" else signal.SIGKILL)
    elif event.what == "damaged shard":
        flip_bit(shard, lab.draw("shard"))
    elif event.what == "slow store":
        flag.touch()
    elif event.what == "full disk":
        with (place / "ballast").open("wb") as file:
            status = os.statvfs(place)
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)


def _heal(what: str, lab: Lab, copy: Path, flag: Path, place: Path) -> None:
    if what == "damaged shard":
        shutil.copytree(lab.data / "train", copy, dirs_exist_ok=True)
    elif what == "slow store":
        flag.unlink(missing_ok=True)
    elif what == "full disk":
        (place / "ballast").unlink()


def picture(day: Day) -> str:
    """The day as a line: training, starting, shut out, and what happened when."""
    width, scale = 960, 960 / day.seconds
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 40} 150" font-family="sans-serif" '
        'font-size="12">'
    ]

    def bar(begin: float, end: float, kind: str) -> None:
        x, wide = 20 + begin * scale, max(0.0, end - begin) * scale
        parts.append(f'<rect x="{x:.1f}" y="60" width="{wide:.1f}" height="34" fill="{COLOURS[kind]}"/>')

    for start, after in zip(day.starts, [*day.starts[1:], None], strict=True):
        end = after.began if after else day.seconds
        if start.first is None or start.last is None:
            bar(start.began, end, "shut out")
            continue
        bar(start.began, start.first, "starting")
        bar(start.first, start.last, "training")
        bar(start.last, end, "starting")
    for event in SCHEDULE:
        x = 20 + event.at / DAY * width
        high = {"preemption": 52, "kill -9": 36}.get(event.what, 20)
        parts.append(f'<line x1="{x:.1f}" y1="{high}" x2="{x:.1f}" y2="60" stroke="#444"/>')
        if event.what not in ("preemption", "kill -9"):
            parts.append(f'<text x="{x:.1f}" y="{high - 4}" text-anchor="middle">{event.what}</text>')
    parts += [
        f'<text x="{20 + hour / 24 * width:.1f}" y="110" text-anchor="middle">{hour} h</text>'
        for hour in range(0, 25, 4)
    ]
    for i, (name, colour) in enumerate((name, colour) for name, colour in COLOURS.items() if name != "lost"):
        parts.append(f'<rect x="{20 + 120 * i}" y="124" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{38 + 120 * i}" y="135">{name}</text>')
    parts.append('<text x="400" y="135">short lines: preemptions; longer ones: kill -9</text></svg>')
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Live the day and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_day", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the compressed day; default 240")
    parser.add_argument("--start-seconds", type=float, default=40.0, help="from a start to its first step; default 40")
    words = "for which a checkpoint keeps a real run waiting; default 0.5"
    parser.add_argument("--blocked-seconds", type=float, default=0.5, help=words)
    parser.add_argument("--svg", type=Path, help="the day as a picture")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.out.mkdir(parents=True, exist_ok=True)
    reason = warm.private_mounts()
    if reason:
        print(f"a disk of its own is needed, and there can be none here: {reason}", file=sys.stderr)
        return 70
    warm.prepare()
    day = live(Lab(options.out.absolute(), 1, private=True), options.seconds)
    trained = sum(start.first is not None for start in day.starts)
    print(
        f"{len(day.starts)} starts, {trained} of which trained; {day.steps} steps count, {day.lost_steps} were lost; "
        f"shut out for {100 * day.shut_out():.2f} % of the day\n"
        f"effective training time: raw {100 * day.raw():.1f} % of {day.seconds:.0f} s; of a real day "
        f"{100 * day.real(options.start_seconds, options.blocked_seconds):.2f} %, with {options.start_seconds:.0f} s "
        f"for a start, a checkpoint every {INTERVAL:.0f} s that blocks for {options.blocked_seconds} s"
    )
    if options.svg is not None:
        options.svg.write_text(picture(day), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
