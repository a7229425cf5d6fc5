"""Run, within an hour, every check and measurement of this project that needs GPUs, the most important first.

    make first-gpu-hour                                         # on 1, 2, 4 or 8 GPUs, into ./first-gpu-hour
    python -m benchmarks.first_gpu_hour --only base large       # repeat these parts
    python -m benchmarks.first_gpu_hour --rehearse              # all of it, tiny, in some minutes

Each row of hour_parts.PARTS is a command in a separate process with a time limit; a failure or timeout does not stop
the others. A part uses one GPU, another one, two, or all, and starts when they are free and no earlier part waits for
them. The same command resumes: passed parts are not repeated. OUT/summary.md is rewritten after each part; send it and
OUT/parts home, not OUT/work (text and runs). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.hour_numbers import Numbers, Wrong
from benchmarks.hour_parts import PARTS, SHARED, Part, Place, Range, sizes
from benchmarks.interrupted import environments
from modernbert_train.core.files import write_whole
from modernbert_train.core.text import markdown_table
from modernbert_train.distributed.visible_gpus import count_gpus, driver_version, output_of, why_torch_sees_none
from modernbert_train.errors import ConfigError, StoppedEarly

ROOT = Path(__file__).resolve().parent.parent
REHEARSED = 5  # factor on the time limits of a rehearsal, whose cores may be few and busy
PASSED, FAILED, STOPPED, SKIPPED = "passed", "failed", "stopped at its limit", "skipped"
MARK = "MODERNBERT_FIRST_GPU_HOUR"  # environment variable that marks all descendants of a part


class Running:
    """A part that has started."""

    def __init__(self, part: Part, place: Place) -> None:
        self.part, self.place = part, place
        self.minutes = part.minutes * (REHEARSED if place.tiny else 1)
        self.words = shlex.split(part.command.format(**sizes(part, place)))
        self.log = place.out / "parts" / f"{part.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.run, ignore_errors=True)
        self.mark = str(self.log)
        print(f"== {part.name}: {part.what}; at most {self.minutes:g} minutes", flush=True)
        settings = {
            "CUDA_VISIBLE_DEVICES": ",".join(place.of(part)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            MARK: self.mark,
        }
        if place.ranks(part) > len(place.of(part)):
            settings |= SHARED
        self.began = time.monotonic()
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.words],
                cwd=ROOT,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is handled by this program
            )

    @property
    def run(self) -> Path:
        """The folder of the run that it trains, if any."""
        return self.place.out / "work/runs" / self.part.name

    def outcome(self) -> str | None:
        """Return how it ended; None while it runs within its time limit."""
        if (code := self.process.poll()) is not None:
            return PASSED if code == 0 else FAILED
        return STOPPED if time.monotonic() - self.began > 60 * self.minutes else None

    def end(self) -> None:
        """Kill all descendants of the part, since the next part needs its GPUs."""
        deadline = time.monotonic() + 30
        while alive := [pid for pid, environment in environments() if environment.get(MARK) == self.mark]:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:  # stuck in the kernel, as with a hanging GPU
                break
            time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)

    def record(self, outcome: str) -> dict[str, Any]:
        """Return its record for the summary."""
        seconds = time.monotonic() - self.began
        reason = ""
        if outcome == FAILED:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line for line in lines if line.startswith(("error: ", "FAILED "))]
            last = (errors or [line for line in lines if line.strip()] or ["it printed nothing"])[-1]
            reason = f"exit code {self.process.returncode}: {last.strip()[:300]}"
        elif outcome == STOPPED:
            reason = f"not done after {self.minutes:g} minutes"
        numbers: Numbers = {}
        try:
            numbers = self.part.numbers(self.place.out, self.part.name)
        except Wrong as error:
            numbers = error.numbers
            outcome, reason = (FAILED if outcome == PASSED else outcome), reason or str(error)
        except Exception as error:  # the output of a failed command may be malformed in any way
            if outcome == PASSED:
                outcome, reason = FAILED, f"its output cannot be read: {type(error).__name__}: {error}"
        shutil.rmtree(self.run / "checkpoints", ignore_errors=True)  # gigabytes each
        return {
            "name": self.part.name,
            "outcome": outcome,
            "reason": reason,
            "seconds": round(seconds, 1),
            "command": shlex.join(["python", *self.words]),
            "numbers": numbers,
        }


def do(
    parts: Sequence[Part], place: Place, about: str, done: dict[str, dict[str, Any]], only: Sequence[str] | None = None
) -> None:
    """Run the remaining parts, and write the summary after each.

    Args:
        parts: the most important first.
        place: machine and folder.
        about: this machine and its versions.
        done: records of finished parts, which are skipped; new ones are added.
        only: names of the parts that may run; None: all.
    """
    for part in parts:
        if len(place.gpus) < part.min_gpus:
            few = f"{len(place.gpus)} GPU{'s' if len(place.gpus) > 1 else ''}"
            reason = f"needs {part.min_gpus} GPUs, and there {'are' if len(place.gpus) > 1 else 'is'} {few}"
            if part.min_gpus == 3 and len(place.gpus) == 2:
                reason = "all GPUs are two here: see the parts two-..."
            done[part.name] = {"name": part.name, "outcome": SKIPPED, "reason": reason, "numbers": {}}
        elif part.max_gpus is not None and len(place.gpus) > part.max_gpus:
            reason = f"{len(place.gpus)} GPUs are here: see {part.name.replace('shared', 'two')}"
            done[part.name] = {"name": part.name, "outcome": SKIPPED, "reason": reason, "numbers": {}}
    waiting = [part for part in parts if part.name not in done and (only is None or part.name in only)]
    running: list[Running] = []
    try:
        while waiting or running:
            for each in running[:]:
                if (outcome := each.outcome()) is not None:
                    each.end()
                    running.remove(each)
                    record = done[each.part.name] = each.record(outcome) | {"about": about}
                    file = each.log.with_suffix(".json")
                    write_whole(file, json.dumps(record, indent=1))
                    write_summary(parts, place, about, done)
                    print(f"   {each.part.name}: {record['outcome']} {record['reason']}", flush=True)
            taken = {gpu for each in running for gpu in place.of(each.part)}
            for part in waiting[:]:
                gpus = set(place.of(part))
                if taken.isdisjoint(gpus):
                    waiting.remove(part)
                    running.append(Running(part, place))
                taken |= gpus  # also if it must wait, so that later parts do not take its GPUs first
            time.sleep(0.1)
    finally:
        for each in running:
            each.end()
        write_summary(parts, place, about, done)


def write_summary(parts: Sequence[Part], place: Place, about: str, done: dict[str, dict[str, Any]]) -> None:
    """Write OUT/summary.json and OUT/summary.md: every part, its numbers next to the expected ones, and advice."""
    place.out.mkdir(parents=True, exist_ok=True)
    summary = {
        "about": about,
        "parts": [done.get(part.name, {"name": part.name, "outcome": "not yet"}) for part in parts],
    }
    (place.out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    (place.out / "summary.md").write_text(as_markdown(parts, about, done, place.tiny), encoding="utf-8")


def as_markdown(parts: Sequence[Part], about: str, done: dict[str, dict[str, Any]], tiny: bool = False) -> str:
    """Return the summary as Markdown; numbers of a rehearsal are not compared with expected ones."""
    outcomes = [done.get(part.name, {}).get("outcome", "not yet") for part in parts]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
    table, numbers, advice = [], [], []
    for part, outcome in zip(parts, outcomes, strict=True):
        record = done.get(part.name, {})
        minutes = f"{record['seconds'] / 60:.1f}" if "seconds" in record else ""
        table.append((part.name, part.what, outcome, minutes, record.get("reason", "")))
        unlike = []
        for name, value in record.get("numbers", {}).items():
            verdict = "" if tiny else _beside(value, part.expected.get(name, (None, None)))
            numbers.append((part.name, name, _written(value), _expectation(part.expected.get(name)), verdict))
            unlike += [f"{name} is {verdict}"] if verdict else []
        if outcome in (FAILED, STOPPED) or unlike:
            why = "; ".join(filter(None, (record.get("reason", ""), *unlike)))
            advice.append(
                f"- **{part.name}**: {why.rstrip('.')}. What to do: {part.otherwise}. Log: `parts/{part.name}.log`."
            )
    others = sorted({record["about"] for record in done.values() if record.get("about", about) != about})
    return "\n".join(
        (
            f"# First GPU hour{', rehearsed' * tiny}: {counts}",
            "",
            about,
            *(f"\nSome parts are from: {other}" for other in others),
            "",
            markdown_table(("part", "what", "outcome", "minutes", "reason"), table),
            "",
            "## Numbers",
            "",
            "Expected values are predicted for an H100 with 80 GB. Rates are per GPU."
            + " In a rehearsal everything is too small for them." * tiny,
            "",
            markdown_table(("part", "number", "seen", "expected", ""), numbers),
            "",
            "## What to do",
            "",
            *(advice or ["Nothing: all is as expected."]),
            "",
        )
    )


def _beside(value: float, expected: Range) -> str:
    low, high = expected
    if low is not None and value < low:
        return "below"
    return "above" if high is not None and value > high else ""


def _written(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _expectation(expected: Range | None) -> str:
    if expected is None or expected == (None, None):
        return ""
    low, high = expected
    if low is None or high is None:
        return f"at most {_written(high)}" if low is None else f"at least {_written(low)}"
    return _written(low) if low == high else f"{_written(low)} to {_written(high)}"


_LOOK = """
import json, platform, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"names": [g.name for g in gpus], "gigabytes": min([g.total_memory / 1e9 for g in gpus], default=0),
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}))
"""


def look() -> tuple[tuple[str, ...], float, str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them, the smallest one's gigabytes, and a description.

    Another process queries torch, so that this one holds no GPU memory.

    Raises:
        ConfigError: there is no GPU.
    """
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise ConfigError(f"torch cannot be queried for GPUs: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    seen = json.loads(done.stdout.splitlines()[-1])
    if not seen["names"]:
        why = why_torch_sees_none(driver_version(), seen["torch"], f"CUDA {seen['cuda']}" if seen["cuda"] else "CPUs")
        raise ConfigError(f"the first GPU hour needs a GPU, and torch sees none ({count_gpus()} shown). {why}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = tuple(filter(None, visible.split(","))) or tuple(map(str, range(len(seen["names"]))))
    commit = output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip() or "unknown"
    names = ", ".join(f"{seen['names'].count(name)} x {name}" for name in dict.fromkeys(seen["names"]))
    about = (
        f"{names}, driver {driver_version() or 'unknown'}, CUDA {seen['cuda']}, torch {seen['torch']}, Python "
        f"{seen['python']}, {os.cpu_count()} CPU cores, commit {commit}"
    )
    return gpus[: len(seen["names"])], seen["gigabytes"], about


def records_of(parts: Sequence[Part], out: Path) -> dict[str, dict[str, Any]]:
    """Return the records of parts that have passed before."""
    records = {}
    for part in parts:
        file = out / "parts" / f"{part.name}.json"
        record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if record.get("outcome") == PASSED:
            records[part.name] = record
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for everything; default: first-gpu-hour")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}; also repeats")
    parser.add_argument("--again", action="store_true", help="repeat passed parts, too")
    parser.add_argument("--rehearse", action="store_true", help="everything tiny: tests the parts, not their speed")
    options = parser.parse_args(arguments)
    try:
        gpus, gigabytes, about = look()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    out = options.out or Path("first-gpu-hour-rehearsal" if options.rehearse else "first-gpu-hour")
    place = Place(out.resolve(), gpus, gigabytes, options.rehearse)
    done = records_of(PARTS, place.out)
    for name in names:
        if options.again or name in (options.only or ()):
            done.pop(name, None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        do(PARTS, place, about, done, options.only)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command resumes. So far: {place.out / 'summary.md'}", file=sys.stderr)
        return StoppedEarly.exit_code
    print(f"\n{place.out / 'summary.md'}: {(place.out / 'summary.md').read_text(encoding='utf-8').splitlines()[0]}")
    return 1 if any(record["outcome"] in (FAILED, STOPPED) for record in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
