"""Everything that a GPU can tell about this project, in one call of limited length: equality first, then speed.

    python -m benchmarks.gpu_session --minutes 8 --out results/        # on a machine with one GPU
    python -m benchmarks.gpu_session --rehearse --out /tmp/rehearsal   # the same steps on a CPU, at the smallest sizes

Steps run one after the other, the most important first, each in a process of its own with a limit of its own; what does
not fit in the time left is skipped and named. Each step's output is in OUT/<step>.log, figures in OUT/<step>.json, and
OUT/summary.md has the tables for RESULTS.md with commit, versions and commands. Nothing is downloaded. Whether a switch
pays is measured by `python -m modernbert_train tune`, the users' command, which is one of the steps.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 15  # below this a step is not worth starting


@dataclass(frozen=True)
class Step:
    """A command of python -m, and how long it may take at most."""

    name: str
    words: str
    seconds: int
    writes_json: bool = False


# the tests take minutes one after the other, most of them compilation; a GPU holds several at a time
_SIDE_BY_SIDE = " -n 5 --dist loadfile" if find_spec("xdist") else ""
_AB = "benchmarks.train_step --preset gpu --rounds 1 --steps 30 --no-reference --no-trainer --only"
STEPS = (
    Step("tests", f"pytest -m 'gpu or not slow' tests/gpu tests/optim/test_fused.py -q{_SIDE_BY_SIDE}", 170),
    Step("goals-base", "benchmarks.train_step --preset gpu --only base-1024 base-8192", 150, True),
    Step("goals-large", "benchmarks.train_step --preset gpu --only large-1024 large-8192 --no-reference", 150, True),
    # what each switch of a run wins, each held against the plain form before
    Step("tune-base-1024", "benchmarks.tuned base-1024 --minutes 10", 900, True),
    Step("tune-base-8192", "benchmarks.tuned base-8192 --minutes 10", 900, True),
    # a mode of the compiler that runs do not have yet
    Step("autotune", f"{_AB} base-1024 --compile max-autotune-no-cudagraphs", 90, True),
    Step("kernels", "benchmarks.kernels --preset gpu", 120, True),
)
REHEARSAL = (
    Step("tests", "pytest -m gpu tests/gpu/test_parity.py -q -p no:cacheprovider", 300),
    Step("goals", "benchmarks.train_step --preset cpu --rounds 1 --steps 1", 300, True),
    Step("tune", "benchmarks.tuned small-1024 --preset cpu --minutes 1", 600, True),
    Step("kernels", "benchmarks.kernels --preset cpu --only packing", 300, True),
)


def run_steps(steps: tuple[Step, ...], out: Path, seconds: float) -> list[tuple[Step, str, float]]:
    """Run what fits.

    Args:
        steps: in order.
        out: folder for logs and figures.
        seconds: for all together.

    Returns:
        Each step with how it ended ("ok", "failed with N", "stopped after N s", "skipped") and its seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    began, outcomes = time.monotonic(), []
    for step in steps:
        left = seconds - (time.monotonic() - began)
        if left < START_SECONDS:
            outcomes.append((step, "skipped", 0.0))
            continue
        limit, started = min(step.seconds, left), time.monotonic()
        print(f"== {step.name}: python -m {step.words}", flush=True)
        command = [sys.executable, "-m", *shlex.split(step.words)]
        if step.writes_json:
            command += ["--json", str(out / f"{step.name}.json")]
        log = out / f"{step.name}.log"
        with log.open("w", encoding="utf-8") as file:
            environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _path()}
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(limit)
                outcome = "ok" if code == 0 else f"failed with {code}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the workers and ranks that it has started
                process.wait()
                outcome = f"stopped after {limit:.0f} s"
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-25:]), flush=True)
        outcomes.append((step, outcome, time.monotonic() - started))
    return outcomes


def summary(outcomes: list[tuple[Step, str, float]], out: Path) -> str:
    """Markdown: what ran where, and the output of each benchmark."""
    lines = [about(), "", "| step | command | outcome | seconds |", "| --- | --- | --- | --- |"]
    for step, outcome, seconds in outcomes:
        lines.append(f"| {step.name} | `python -m {step.words}` | {outcome} | {seconds:.0f} |")
    for step, outcome, _ in outcomes:
        if outcome != "skipped":
            text = (out / f"{step.name}.log").read_text(encoding="utf-8").splitlines()[-40:]
            lines += ["", f"### {step.name}", "", "```", *text, "```"]
    return "\n".join(lines) + "\n"


def about() -> str:
    """Commit, versions and GPU on one line."""
    import torch
    import transformers

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    device = "no GPU"
    if torch.cuda.is_available():
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    commit = git.stdout.strip() or os.environ.get("COMMIT", "unknown")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{device}, {versions}, commit {commit}, {time.strftime('%Y-%m-%d')}"


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    parser.add_argument("--out", type=Path, default=Path("gpu_session"), help="folder for logs and figures")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="some of the steps")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at the smallest sizes")
    options = parser.parse_args()
    steps: tuple[Step, ...] = REHEARSAL if options.rehearse else STEPS
    if options.only:
        if unknown := set(options.only) - {step.name for step in steps}:
            parser.error(f"--only {' '.join(sorted(unknown))}: the steps are {', '.join(step.name for step in steps)}")
        steps = tuple(step for step in steps if step.name in options.only)
    if options.rehearse:
        os.environ["MODERNBERT_TEST_DEVICE"] = "cpu"
    out = options.out.resolve()
    outcomes = run_steps(steps, out, 60 * options.minutes)
    text = summary(outcomes, out)
    (out / "summary.md").write_text(text, encoding="utf-8")
    print(text.split("\n### ", maxsplit=1)[0])
    return 0 if all(outcome in ("ok", "skipped") for _, outcome, _ in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
